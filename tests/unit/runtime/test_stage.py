"""Stages chained by hand against the whole network in one piece."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsepipe.runtime.random_generators import KeyedRandomness
from sparsepipe.runtime.stage import StageLayers
from sparsepipe.runtime.transport.serialization import differentiable
from sparsepipe.runtime.weights import Weights
from tests.support.weights_cases import CASES, Oracle, assert_same, loss_of


def leaves_of(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}


def gradients_of(leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: leaf.grad for name, leaf in leaves.items()}


def stages(layers: nn.Sequential, cuts: list[int], **options: Any) -> list[StageLayers]:
    edges = [0, *cuts, len(layers)]
    return [StageLayers(layers, layers, first=a, last=b - 1, **options) for a, b in pairwise(edges)]


def train(
    chain: list[StageLayers], leaves: dict[str, Tensor], value: Any, *, minibatch: int = 0
) -> Tensor:
    """Forward and backward of one minibatch through all stages; the loss."""
    passages = []
    for stage in chain[:-1]:
        passages.append(stage.forward(value, minibatch=minibatch, leaves=leaves))
        value = passages[-1].output
    last = chain[-1].forward(
        value, minibatch=minibatch, leaves=leaves, close=lambda run: (loss_of(run()), None)
    )
    gradients = last.backward(None, leaves=leaves)
    for passage in reversed(passages):
        gradients = passage.backward(gradients, leaves=leaves)
    assert gradients == []  # the batch needs none
    return last.loss


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [[], [1], [2], [1, 3], [2, 3, 4]])
def test_stages_compute_what_the_whole_computes(case: str, cuts: list[int]) -> None:
    network, value = CASES[case].fresh(), CASES[case].batch(1)
    oracle = Oracle(network)
    leaves = leaves_of(network)
    loss = train(stages(network, cuts), leaves, value)
    assert not loss.requires_grad
    assert_same(gradients_of(leaves), oracle.gradients(0, value))
    assert all(p.grad is None for p in network.parameters())
    assert_same(network.state_dict(), oracle.state())  # statistics too, updated once


class Fork(nn.Module):
    """A tensor, the same once more, an integer and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "again": (y, x), "rows": torch.arange(len(x)), "unused": y * 2, "n": 3}


class Join(nn.Module):
    def forward(self, tree: dict[str, Any]) -> Tensor:
        assert tree["y"] is tree["again"][0]
        y, x = tree["again"]
        return (y * tree["y"] + x)[tree["rows"]] * tree["n"]


def test_any_tree_goes_between_stages() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), Fork(), nn.Identity(), Join(), nn.Linear(4, 2))
    value = torch.randn(5, 4)
    expected = Oracle(network).gradients(0, value)
    for cuts in ([2], [3], [1, 2, 3], [2, 3, 4]):
        leaves = leaves_of(network)
        train(stages(network, cuts), leaves, value)
        assert_same(gradients_of(leaves), expected)


def test_gradients_come_back_in_the_order_of_the_tree() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Fork(), nn.Identity())
    upstream = StageLayers(network, network, first=0, last=0)
    downstream = StageLayers(network, network, first=1, last=1)
    value = torch.randn(5, 4, requires_grad=True)
    leaves = leaves_of(network)
    sent = upstream.forward(value, minibatch=0, leaves=leaves)
    wanted = differentiable(sent.output)
    assert [tensor.grad_fn for tensor in wanted] == [None] * 3  # y, x, unused; y once
    assert not sent.output["rows"].requires_grad
    received = downstream.forward(sent.output, minibatch=0, leaves={})
    given = [torch.full_like(wanted[0], 2.0), None, torch.full_like(wanted[2], 3.0)]
    first, second, third = received.backward(given, leaves={})
    assert second is None
    assert torch.equal(first, given[0])
    assert torch.equal(third, given[2])
    (of_input,) = sent.backward([first, second, third], leaves=leaves)
    weight, total = leaves["0.linear.weight"], torch.full((5, 4), 2.0 + 2 * 3.0)
    torch.testing.assert_close(of_input, total @ weight)
    torch.testing.assert_close(weight.grad, total.T @ value)
    assert value.grad is None


def test_a_stage_may_begin_in_place() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    value = torch.randn(3, 6)
    expected = Oracle(network).gradients(0, value)
    for cuts in ([1], [2], [1, 2]):
        leaves = leaves_of(network)
        train(stages(network, cuts), leaves, value)
        assert_same(gradients_of(leaves), expected)


class Recomputed(nn.Module):
    def __init__(self, *, use_reentrant: bool | None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize(
    ("use_reentrant", "spans"), [(False, []), (True, []), (None, [range(3)]), (None, [range(1, 2)])]
)
def test_recomputation_runs_on_the_weights_of_the_forward(
    use_reentrant: bool | None, spans: list[range]
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), Recomputed(use_reentrant=use_reentrant), nn.Tanh())
    plain = deepcopy(network)
    plain[1].forward = plain[1].inner.forward
    value = torch.randn(5, 6)
    keyed = KeyedRandomness(seed=1)
    (stage,) = stages(network, [], randomness=keyed, recomputed=spans)
    weights = Weights(dict(network.named_parameters()), "stash")
    expected = leaves_of(plain)
    train(stages(plain, [], randomness=keyed), expected, value)
    leaves = weights.begin(0, version=0)
    passage = stage.forward(
        value, minibatch=0, leaves=leaves, close=lambda run: (loss_of(run()), None)
    )
    with weights.updating(), torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    passage.backward(None, leaves=weights.begin_backward(0))
    assert_same(weights.finish(0), gradients_of(expected))
    assert all(p.grad is None for p in network.parameters())


def dropout_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 3)
    )


def keyed_gradients(cuts: list[int], *, seed: int = 5, minibatch: int = 0) -> dict[str, Tensor]:
    network = dropout_net()
    torch.manual_seed(len(cuts))  # what was drawn before must not matter
    leaves = leaves_of(network)
    chain = stages(network, cuts, randomness=KeyedRandomness(seed=seed))
    train(chain, leaves, CASES["mlp"].batch(0), minibatch=minibatch)
    return gradients_of(leaves)


def test_keyed_masks_do_not_depend_on_the_cuts() -> None:
    whole = keyed_gradients([])
    for cuts in ([1], [2], [1, 2, 3, 4]):
        assert_same(keyed_gradients(cuts), whole)


def test_autocast_covers_the_forward_and_crosses_stages() -> None:
    network, value = CASES["mlp"].fresh(), CASES["mlp"].batch(0)
    whole = deepcopy(network)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    with autocast():
        loss = loss_of(whole(value))
    loss.backward()
    chain = stages(network, [1, 4], autocast=autocast)
    leaves = leaves_of(network)
    assert chain[0].forward(value, minibatch=0, leaves=leaves).output.dtype == torch.bfloat16
    train(chain, leaves, value)
    assert_same(gradients_of(leaves), {n: p.grad for n, p in whole.named_parameters()})


class Scaled(nn.Module):
    """A module with layers, and parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))
        self.layers[2].weight = self.tied = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def step(self, x: Tensor) -> tuple[Tensor, str]:
        return loss_of(self.layers(x) @ self.tied) * self.scale, "logged"


def test_the_last_stage_runs_what_is_around_the_layers_on_the_same_leaves() -> None:
    torch.manual_seed(0)
    module, value = Scaled(), torch.randn(5, 6)
    whole = deepcopy(module)
    loss, _ = whole.step(value)
    loss.backward()
    first = StageLayers(module, module.layers, first=0, last=0)
    last = StageLayers(module, module.layers, first=1, last=2)
    leaves = leaves_of(module)
    sent = first.forward(value, minibatch=0, leaves=leaves)

    def close(run: Any) -> tuple[Tensor, str]:
        output = run()
        return loss_of(output @ module.tied) * module.scale, "logged"

    passage = last.forward(sent.output, minibatch=0, leaves=leaves, close=close)
    assert (passage.loss, passage.extra, passage.output) == (loss, "logged", None)
    sent.backward(passage.backward(None, leaves=leaves), leaves=leaves)
    assert_same(gradients_of(leaves), {n: p.grad for n, p in whole.named_parameters()})
    assert "layers.0.weight" in leaves
