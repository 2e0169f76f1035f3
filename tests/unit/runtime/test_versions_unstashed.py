"""The modes whose backward may see other weights than the forward: none and SpecTrain."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.support.weights_cases import CASES, Oracle, Runner, alive_after, assert_same, clones


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.05, "momentum": 0.9, **options})


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))


def by_hand(
    forward: dict[str, Tensor], backward: dict[str, Tensor], x: Tensor
) -> dict[str, Tensor]:
    """Gradients of mean(y^2) + mean(y[:, 0]): activations from one set, backward on another."""
    before = x @ forward["0.weight"].T
    hidden = before.clamp(min=0)
    y = hidden @ forward["2.weight"].T
    dy = 2 * y / y.numel()
    dy[:, 0] += 1 / len(y)
    dhidden = (dy @ backward["2.weight"]) * (before > 0)
    return {"0.weight": dhidden.T @ x, "2.weight": dy.T @ hidden}


TWO_LAYERS = SimpleNamespace(
    batch=CASES["mlp"].batch, fresh=lambda: (torch.manual_seed(7), two_layers())[1]
)


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_without_versions_the_backward_sees_the_present_weights() -> None:
    runner = Runner(TWO_LAYERS, "none", optimizer=sgd)
    before = clones(runner.network)
    place = runner.network[0].weight.data_ptr()
    leaves = runner.forward(0)
    runner.forward(1)
    runner.backward(0)
    runner.update()
    after = clones(runner.network)
    found = runner.backward(1)
    x = runner.case.batch(1)
    assert_close(found, by_hand(before, after, x))
    stashed = by_hand(before, before, x)["0.weight"]
    assert not torch.allclose(found["0.weight"], stashed, rtol=1e-5)
    assert runner.network[0].weight.data_ptr() == leaves["0.weight"].data_ptr() == place
    assert runner.weights.version_of_forward == {0: 0, 1: 0}
    assert runner.weights.version_of_backward == {0: 0, 1: 1}
    assert runner.weights.memory.peak_versions == 1


@pytest.mark.parametrize("case", CASES)
def test_without_versions_and_without_delay_training_is_ordinary(case: str) -> None:
    runner = Runner(CASES[case], "none")
    oracle = Oracle(runner.network)
    for m in range(3):
        expected = oracle.gradients(m, runner.case.batch(m))
        runner.forward(m)
        assert_same(runner.backward(m), expected)
        oracle.update(expected)
        runner.update()
    assert_same(runner.network.state_dict(), oracle.state())


class Momentum:
    """SGD's recursion and SpecTrain's prediction, in Python floats' precision."""

    def __init__(self, network: nn.Module, *, lr=0.05, mu=0.9, decay=0.0, dampening=0.0,
                 nesterov=False, maximize=False) -> None:  # fmt: skip
        self.w = {n: w.double() for n, w in clones(network).items()}
        self.v: dict[str, Tensor] = {}
        self.lr, self.mu, self.decay, self.dampening = lr, mu, decay, dampening
        self.nesterov, self.sign = nesterov, -1 if maximize else 1

    def update(self, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            g = self.sign * gradient.double() + self.decay * self.w[name]
            if name in self.v:
                self.v[name] = self.mu * self.v[name] + (1 - self.dampening) * g
            else:
                self.v[name] = g
            step = g + self.mu * self.v[name] if self.nesterov else self.v[name]
            self.w[name] = self.w[name] - self.lr * step

    def predicted(self, ahead: int) -> dict[str, Tensor]:
        return {n: w - ahead * self.lr * self.v.get(n, 0.0) for n, w in self.w.items()}


OPTIONS = {
    "plain": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"decay": 0.1}),
    "nesterov": ({"nesterov": True}, {"nesterov": True}),
    "dampening": ({"dampening": 0.5}, {"dampening": 0.5}),
    "maximize": ({"maximize": True, "lr": 1e-3}, {"maximize": True, "lr": 1e-3}),
    "one by one": ({"foreach": False}, {}),
    "fused": ({"fused": True}, {}),
    "rate as tensor": ({"lr": torch.tensor(0.05)}, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_forwards_see_the_prediction_and_backwards_the_same(name: str) -> None:
    theirs, ours = OPTIONS[name]
    runner = Runner(CASES["mlp"], "spectrain", optimizer=lambda p: sgd(p, **theirs))
    momentum = Momentum(runner.network, **ours)
    oracle = Oracle(runner.network)
    choices = random.Random(3)
    in_flight: dict[int, dict] = {}
    for m in range(12):
        ahead = choices.randrange(4)
        leaves = runner.forward(m, ahead=ahead)
        for n, expected in momentum.predicted(ahead).items():
            torch.testing.assert_close(leaves[n].double(), expected, rtol=1e-5, atol=1e-6)
        in_flight[m] = oracle.gradients(
            {n: t.detach() for n, t in leaves.items()}, runner.case.batch(m)
        )
        if len(in_flight) > choices.randrange(1, 4):
            chosen = choices.choice(list(in_flight))
            assert_same(runner.backward(chosen), in_flight.pop(chosen))
            momentum.update(runner.gradients)
            runner.update()
    assert runner.weights.version > 3
    versions = runner.weights.version_of_forward
    assert all(versions[m] == v for m, v in runner.weights.version_of_backward.items())


@pytest.mark.parametrize("when", ["before the first step", "nothing ahead"])
def test_where_nothing_is_predicted_the_weights_are_the_present_ones(when: str) -> None:
    runner = Runner(CASES["mlp"], "spectrain", optimizer=sgd)
    ahead = 5
    if when == "nothing ahead":
        list(alive_after(runner, "F0 B0 U0"))
        ahead = 0
    leaves = runner.forward(9, ahead=ahead)
    assert_same({n: t.detach() for n, t in leaves.items()}, clones(runner.network))
    for name, parameter in runner.network.named_parameters():
        assert leaves[name].data_ptr() != parameter.data_ptr()


def test_a_schedule_of_rates_moves_the_prediction() -> None:
    runner = Runner(CASES["mlp"], "spectrain", optimizer=sgd)
    list(alive_after(runner, "F0 B0 U0"))
    runner.optimizer.param_groups[0]["lr"] = 0.5
    weight = runner.network[0].weight
    velocity = runner.optimizer.state[weight]["momentum_buffer"]
    found = runner.forward(1, ahead=2)["0.weight"]
    torch.testing.assert_close(found.detach(), weight.detach() - 2 * 0.5 * velocity)


def test_the_backward_may_be_predicted_anew() -> None:
    runner = Runner(TWO_LAYERS, "spectrain", optimizer=sgd, predict_backward=True)
    list(alive_after(runner, "F0 B0 U0"))
    momentum = runner.optimizer.state
    leaves = runner.forward(1, ahead=2)
    forward = {n: t.detach().clone() for n, t in leaves.items()}
    list(alive_after(runner, "F2 B2 U2"))
    backward = {
        n: (p - 1 * 0.05 * momentum[p]["momentum_buffer"]).detach()
        for n, p in runner.network.named_parameters()
    }
    found = runner.backward(1, ahead=1)
    x = runner.case.batch(1)
    assert_close(found, by_hand(forward, backward, x))
    once = by_hand(forward, forward, x)["0.weight"]
    assert not torch.allclose(found["0.weight"], once, rtol=1e-5)
    assert runner.weights.version_of_forward[1] == 1
    assert runner.weights.version_of_backward[1] == 2
