"""Profiles of a device that is made slower, against the processor time that its layers use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_measure import CPU, sparse_batch
from torch import Tensor, nn

from sparsepipe.models.vgg_sparse import sparse_vgg
from sparsepipe.profiling.measure import measure, step_seconds
from sparsepipe.runtime.throttle import Throttle
from sparsepipe.sparse import watching_kernel_maps

SLOWDOWN = 4.0


def compute(seconds: float) -> None:
    """Uses as much of this thread's processor time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        compute(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        compute(ctx.backward_s)
        return gradient, None, None


class Busy(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.times = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Busy.apply(x, *self.times)  # type: ignore[no-untyped-call, no-any-return]


def test_layers_and_steps_take_as_many_times_as_long() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Busy(0.01, 0.02), Busy(0.0004, 0.0003))
    batches = [torch.randn(3, 4)]
    slowed = Throttle(SLOWDOWN).slowed
    found = measure(net, batches, device=CPU, num_warmup=1, num_measured=3, slowed=slowed)
    for layer, (forward_s, backward_s) in zip(
        found.layers[1:], [(0.01, 0.02), (0.0004, 0.0003)], strict=True
    ):
        assert layer.forward_s >= SLOWDOWN * forward_s
        assert layer.backward_s >= SLOWDOWN * backward_s
    step_s = step_seconds(net, batches, device=CPU, num_measured=3, slowed=slowed)
    assert step_s >= SLOWDOWN * (0.01 + 0.02 + 0.0004 + 0.0003)


def test_kernel_maps_are_slowed_within_their_layer() -> None:
    throttle = Throttle(SLOWDOWN)
    blocks_s: list[tuple[int, float]] = []  # depth, and what was computed in it
    open_blocks, marks, passed = 0, 0, 0

    @contextmanager
    def slowed() -> Iterator[None]:
        nonlocal open_blocks
        open_blocks += 1
        with throttle.slowed():
            begin_s = time.thread_time()
            yield
            blocks_s.append((open_blocks, time.thread_time() - begin_s))
        open_blocks -= 1

    def watch() -> None:
        nonlocal marks
        marks += 1

    def between(number: int) -> None:
        nonlocal passed
        passed = marks  # counting memory afterwards builds them again

    net = sparse_vgg(11, 10, width=1 / 16)
    with watching_kernel_maps(watch):
        found = measure(
            net,
            [sparse_batch(0)],
            device=CPU,
            num_warmup=0,
            num_measured=1,
            between=between,
            slowed=slowed,
        )
    builds_s = [seconds for depth, seconds in blocks_s if depth == 2]
    assert 0 < 2 * len(builds_s) == passed, "each map is a block within its layer's"
    told_s = sum(layer.kernel_map_s or 0.0 for layer in found.layers)
    assert told_s >= SLOWDOWN * sum(builds_s)
    assert all((layer.kernel_map_s or 0.0) <= layer.forward_s for layer in found.layers)


@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_what_layers_compute_stays(slowdown: float) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batch = torch.randn(3, 4)
    slowed = Throttle(slowdown).slowed
    found = measure(net, [batch], device=CPU, num_warmup=0, num_measured=1, slowed=slowed)
    assert [layer.parameter_bytes for layer in found.layers] == [4 * 15, 0]
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())
