"""Profiles of a device that is made slower, against the processor time that its layers use."""

from __future__ import annotations

import time
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
    computed_s: list[float] = []
    passed: list[int] = []

    def watch() -> None:
        computed_s.append(time.thread_time())

    def between(number: int) -> None:
        passed.append(len(computed_s))  # counting memory afterwards builds them again

    net = sparse_vgg(11, 10, width=1 / 16)
    with watching_kernel_maps(watch):
        found = measure(
            net,
            [sparse_batch(0)],
            device=CPU,
            num_warmup=0,
            num_measured=1,
            between=between,
            slowed=Throttle(SLOWDOWN).slowed,
        )
    marks_s = computed_s[: passed[0]]
    builds_s = sum(end - begin for begin, end in zip(marks_s[::2], marks_s[1::2], strict=True))
    assert builds_s > 0
    told_s = sum(layer.kernel_map_s or 0.0 for layer in found.layers)
    # Our own watcher takes a little more in than that of the profile.
    assert told_s >= 0.9 * SLOWDOWN * builds_s
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
