"""Profiles of a device that is made slower: of what it pauses for, and of what its layers say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.models.vgg import sparse_vgg
from sparsepipe.profiling import timing as clock
from sparsepipe.profiling.measure import measure
from sparsepipe.profiling.timing import step_seconds
from sparsepipe.runtime.slowdown import Slowdown
from sparsepipe.sparse import watching_kernel_maps
from tests.unit.profiling.test_measure import CPU, sparse_batch

SLOWDOWN = 4.0


class Hand:
    """Of a clock that stands still but for what layers say that they take."""

    now_s = 0.0

    @contextmanager
    def slowed(self) -> Iterator[None]:
        begin_s = self.now_s
        yield
        self.now_s += (SLOWDOWN - 1) * (self.now_s - begin_s)


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: hand.now_s))
    return hand


class _Taking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hand: Hand, forward_s: float, backward_s: float) -> Tensor:
        ctx.hand, ctx.backward_s = hand, backward_s
        hand.now_s += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.hand.now_s += ctx.backward_s
        return gradient, None, None, None


class Taking(nn.Module):
    """A layer that takes so long on a clock of its own."""

    def __init__(self, hand: Hand, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.hand, self.times_s = hand, (forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Taking.apply(x, self.hand, *self.times_s)  # type: ignore[no-untyped-call, no-any-return]


TIMES_S = [(0.01, 0.02), (0.0, 0.0), (0.0004, 0.0003)]
BATCHES = [torch.zeros(3, 4)]


def network(hand: Hand) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *(Taking(hand, *times_s) for times_s in TIMES_S))


@pytest.mark.parametrize("times", [1.0, SLOWDOWN])
def test_layers_and_steps_take_as_many_times_as_long(hand: Hand, times: float) -> None:
    """No layer gets the time of another or of its other way."""
    slowed = nullcontext if times == 1.0 else hand.slowed
    net = network(hand)
    found = measure(net, BATCHES, device=CPU, num_warmup=1, num_measured=3, slowed=slowed)
    assert (found.layers[0].forward_s, found.layers[0].backward_s) == (0.0, 0.0)
    for layer, (forward_s, backward_s) in zip(found.layers[1:], TIMES_S, strict=True):
        assert layer.forward_s == pytest.approx(times * forward_s)
        assert layer.backward_s == pytest.approx(times * backward_s)
    assert found.meta["step_s"] == pytest.approx(times * sum(map(sum, TIMES_S)))


def test_layers_run_on_the_parts_of_a_batch(hand: Hand) -> None:
    """Layers take longer for a call and for each sample."""
    sizes: list[int] = []

    class ByRow(Taking):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            times_s = (0.5 + len(x) * s for s in self.times_s)
            return _Taking.apply(x, self.hand, *times_s)  # type: ignore[no-untyped-call, no-any-return]

    net, batch = nn.Sequential(nn.Linear(4, 4), ByRow(hand, 2.0, 5.0)), torch.randn(7, 4)
    whole = measure(net, [batch], device=CPU, num_warmup=0, num_measured=1)
    sizes.clear()
    found = measure(
        net, [batch], device=CPU, num_warmup=1, num_measured=1, cut=lambda b: b.tensor_split(3)
    )
    assert sizes[:6] == [3, 2, 2] * 2
    assert whole.layers[1].forward_s == pytest.approx(0.5 + 7 * 2)
    assert found.layers[1].forward_s == pytest.approx(3 * 0.5 + 7 * 2)
    assert found.layers[1].backward_s == pytest.approx(3 * 0.5 + 7 * 5)
    assert found.meta["step_s"] == pytest.approx(3 * (0.5 + 0.5) + 7 * (2 + 5))
    for name in ("activation_bytes", "saved_bytes", "peak_bytes"):
        assert getattr(found.layers[1], name) == getattr(whole.layers[1], name)


def test_it_pauses_once_behind_each_pass(hand: Hand) -> None:
    net = network(hand)
    paused_s: list[float] = []

    @contextmanager
    def slowed() -> Iterator[None]:
        begin_s = hand.now_s
        yield
        paused_s.append(hand.now_s - begin_s)

    measure(net, BATCHES, device=CPU, num_warmup=1, num_measured=2, slowed=slowed)
    forward_s, backward_s = map(sum, zip(*TIMES_S, strict=True))
    passes_and_a_step = 3 + 1
    assert paused_s == pytest.approx(passes_and_a_step * [forward_s, backward_s])


def test_kernel_maps_are_slowed_like_their_layer(hand: Hand) -> None:
    net = sparse_vgg(11, 10, width=1 / 16)
    marks = 0

    def build() -> None:
        nonlocal marks
        marks += 1
        if marks % 2 == 0:  # watched last, so it is the first to hear that one is built
            hand.now_s += 0.001

    counted: list[int] = []
    with watching_kernel_maps(build):
        found = measure(
            net,
            [sparse_batch(0)],
            device=CPU,
            num_warmup=0,
            num_measured=1,
            between=lambda _: counted.append(marks),  # counting memory builds them once more
            slowed=hand.slowed,
        )
    told_s = [layer.kernel_map_s or 0.0 for layer in found.layers]
    assert counted[0] > 0
    built_in_the_pass = counted[0] / 2 / 2  # two marks each; and the step builds them as well
    assert sum(told_s) == pytest.approx(SLOWDOWN * 0.001 * built_in_the_pass)
    assert [layer.forward_s for layer in found.layers] == pytest.approx(told_s)


def test_a_step_takes_as_many_times_as_long_as_the_processor_worked() -> None:
    computed_s: list[float] = []
    slowdown = Slowdown(SLOWDOWN)

    @contextmanager
    def slowed() -> Iterator[None]:
        with slowdown.slowed():
            begin_s = time.thread_time()
            yield
            computed_s.append(time.thread_time() - begin_s)

    net = sparse_vgg(11, 10, width=1 / 16)
    step_s = step_seconds(net, sparse_batch(0), device=CPU, slowed=slowed)
    assert step_s >= SLOWDOWN * sum(computed_s)  # a machine that is busy only adds to that
