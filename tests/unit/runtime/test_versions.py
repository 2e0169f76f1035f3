"""Weight versions against clones of every version."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.weights import Mode, Weights
from tests.support.weights_cases import CASES, SGD, Oracle, Runner, alive_after, assert_same, clones

ADAM = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731


class Pair:
    """Runs events on weights and on the oracle, and compares after each."""

    def __init__(self, case: str, mode: str, *, optimizer=SGD, replicas: int = 1) -> None:
        self.runner = Runner(CASES[case], mode, optimizer=optimizer, replicas=replicas)
        self.oracle = Oracle(self.runner.network, optimizer)
        self.vertical = mode == "vertical_sync"
        self.replicas = replicas
        self.expected: dict[int, dict] = {}
        self.used: dict[int, int] = {}
        self.begun = 0
        self.included = 0
        self.peak = 1

    @property
    def newest(self) -> int:
        return len(self.oracle.history) - 1

    def begin(self, lag: int) -> None:
        """``lag`` is how far vertical sync's version is to advance from the last one's."""
        limit = self.newest * self.replicas + self.replicas - 1
        self.included = min(self.included + lag, limit)
        version = self.included // self.replicas if self.vertical else self.newest
        m = self.begun
        self.begun += 1
        self.expected[m] = self.oracle.gradients(version, self.runner.case.batch(m))
        self.used[m] = version
        self.runner.forward(m, included=self.included)
        self.check()

    def end(self, m: int) -> None:
        assert_same(self.runner.backward(m), self.expected.pop(m))
        weights = self.runner.weights
        assert weights.version_of_forward[m] == weights.version_of_backward[m] == self.used[m]
        self.check()

    def update(self) -> None:
        gradients = {n: None if g is None else g.clone() for n, g in self.runner.gradients.items()}
        self.oracle.update(gradients)
        self.runner.update()
        self.check()

    def check(self) -> None:
        weights = self.runner.weights
        alive = {self.newest, *(self.used[m] for m in self.expected)}
        if self.vertical:
            alive |= set(range(self.included // self.replicas, self.newest))
        self.peak = max(self.peak, len(alive))
        assert 1 + weights.memory.copies == len(alive)
        assert weights.version == self.newest
        assert weights.in_flight == tuple(self.expected)
        assert_same(clones(self.runner.network), self.oracle.history[-1])

    def play(self, choices: random.Random, steps: int) -> None:
        for _ in range(steps):
            kind = choices.choice("FFBBU")
            if kind == "F" and len(self.expected) < 5:
                self.begin(choices.randrange(3))
            elif kind == "B" and self.expected:
                self.end(choices.choice(list(self.expected)))
            elif kind == "U" and self.runner.gradients:
                self.update()
        for m in list(self.expected):
            self.end(m)
        weights = self.runner.weights
        set_bytes = sum(p.nbytes for p in self.runner.network.parameters())
        assert weights.memory.peak_versions == self.peak
        assert weights.memory.peak_bytes == self.peak * set_bytes
        assert_same(self.runner.network.state_dict(), self.oracle.state())


@settings(max_examples=40, deadline=None)
@given(
    choices=st.randoms(use_true_random=False),
    mode=st.sampled_from(["stash", "vertical_sync"]),
    optimizer=st.sampled_from([SGD, ADAM]),
    replicas=st.integers(1, 3),
)
def test_every_minibatch_sees_one_version_in_any_order(choices, mode, optimizer, replicas) -> None:
    Pair("mlp", mode, optimizer=optimizer, replicas=replicas).play(choices, 30)


@pytest.mark.parametrize("mode", ["stash", "vertical_sync"])
@pytest.mark.parametrize("case", ["conv", "sparse"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_convolutions_and_norms_see_one_version(case: str, mode: str, seed: int) -> None:
    Pair(case, mode).play(random.Random(seed), 40)


@pytest.mark.parametrize("case", CASES)
def test_an_update_between_forward_and_backward_changes_no_bit(case: str) -> None:
    pair = Pair(case, "stash")
    pair.begin(0)
    pair.end(0)
    pair.begin(0)
    for _ in range(3):
        pair.update()
    pair.end(1)
    assert pair.runner.weights.version_of_backward[1] == 0
    # Without the stash these gradients differ, so the comparison can tell.
    newest = pair.oracle.gradients(3, pair.runner.case.batch(1))
    assert any(not torch.equal(g, newest[n]) for n, g in pair.runner.gradients.items())


# The actions of one rank and the versions in memory after each, counted by hand.


def test_vertical_sync_keeps_versions_that_a_later_minibatch_may_need() -> None:
    """1-1-1, stage 1: stage 0 has updated max(0, m - 2) times at F(m)."""
    actions = "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 F4 B3 U3 B4 U4"
    expected = [1, 1, 1, 2, 2, 2, 3, 3, 2, 3, 3, 2, 3, 3, 4]
    runner = Runner(CASES["mlp"], "vertical_sync")
    assert list(alive_after(runner, actions, included=lambda m: max(0, m - 2))) == expected
    assert runner.weights.version_of_forward == {0: 0, 1: 0, 2: 0, 3: 1, 4: 2}
    runner.weights.restart()
    assert 1 + runner.weights.memory.copies == 1


def test_parameters_that_do_not_learn_are_not_copied() -> None:
    runner = Runner(CASES["mlp"], "stash")
    frozen = runner.network[3].weight.requires_grad_(False)
    place = frozen.data_ptr()
    leaves = runner.forward(0)
    assert not leaves["3.weight"].requires_grad
    runner.forward(1)
    assert runner.backward(0)["3.weight"] is None
    runner.update()
    assert frozen.data_ptr() == place
    learning = sum(p.nbytes for p in runner.network.parameters() if p.requires_grad)
    assert runner.weights.memory.peak_bytes == frozen.nbytes + 2 * learning


@pytest.mark.parametrize("change", ["value", "frozen"])
@pytest.mark.parametrize("after", ["begin", "again", "update"])
def test_a_change_under_minibatches_in_flight_is_refused(change: str, after: str) -> None:
    runner = Runner(CASES["mlp"], "stash")
    runner.forward(0)
    if change == "value":
        with torch.no_grad():
            runner.network[3].weight.mul_(2)
    else:
        runner.network[3].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"3\.weight was changed between two updates"):
        {"begin": lambda: runner.forward(1), "again": lambda: runner.backward(0),
         "update": lambda: runner.update(runner.gradients)}[after]()  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (2, 3, 4, 5)])
def test_writes_through_data_are_found_by_their_values(shape: tuple[int, ...], kind: Any) -> None:
    parameters = {"a": nn.Parameter(torch.ones(7)), "b": nn.Parameter(torch.rand(shape).to(kind))}
    if len(shape) == 4:
        parameters["b"].data = parameters["b"].data.to(memory_format=torch.channels_last)
    weights = Weights(parameters, Mode.STASH)
    weights.begin(0, version=0)
    weights.note_values()
    weights.check_values()
    one = parameters["b"].data.reshape(-1)[-1:] if not shape else parameters["b"].data[..., -1:]
    one.mul_(1.01)
    with pytest.raises(ConfigError, match="b was changed between two updates"):
        weights.begin(1, version=0)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_writes_to_parts_of_a_larger_tensor_are_found(at: int) -> None:
    """As LSTMs on a GPU have their weights: in one tensor, wherever each begins."""
    flat = torch.arange(12.0)
    parameters = {"a": nn.Parameter(torch.ones(2))}
    parameters["a"].data = flat[at : at + 5]
    weights = Weights(parameters, Mode.STASH)
    weights.begin(0, version=0)
    weights.note_values()
    flat[[at - 1, at + 5]] += 1
    weights.check_values()
    flat[at] += 1
    with pytest.raises(ConfigError, match="a was changed between two updates"):
        weights.begin(1, version=0)


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_layer_that_changes_its_weight_is_refused(how: str) -> None:
    layer = nn.Linear(3, 2)
    weights = Weights(dict(layer.named_parameters()), Mode.STASH)
    leaf = weights.begin(0, version=0)["weight"]
    if how == "replaced":
        leaf.data = leaf.data * 2
    else:
        with torch.no_grad():
            leaf.mul_(2)
    with pytest.raises(ConfigError, match="weight was changed by a layer's forward"):
        weights.begin_backward(0)
