"""Times of a network's step, weight update and copy on a device, and the device's own speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsepipe.profiling.activations import differentiable
from sparsepipe.utils.process import multiplying


class Clock:
    """Sets marks in the work of a device, and measures the seconds between them.

    On CUDA, marks are events in the current stream, and nothing waits for the device until the
    seconds are read; on a CPU, they are readings of a monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Sets a mark at the end of the work so far."""
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Returns the seconds between each mark and the next, and drops the marks."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return [after - before for before, after in pairwise(marks)]
        torch.cuda.synchronize(self._device)
        return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]

    def synchronise(self) -> None:
        """Waits until the device has finished its work."""
        if self._cuda:
            torch.cuda.synchronize(self._device)


def median_and_spread(times_s: Sequence[float]) -> tuple[float, float]:
    """The median and the interquartile range, which is 0 for a single time."""
    if len(times_s) < 2:
        return times_s[0], 0.0
    low, middle, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return middle, high - low


Slowed = Callable[[], AbstractContextManager[None]]
"""Makes a context that lengthens the computation within it, as on a slower device."""


def step_seconds(
    layers: nn.Sequential, value: Any, *, device: torch.device, slowed: Slowed
) -> float:
    """Seconds of a network's forward and backward passes in its current mode; drops the gradients.

    Nothing may have been computed from the input ``value`` before.
    """
    clock = Clock(device)
    clock.synchronise()
    clock.mark()
    with slowed():
        roots = differentiable(layers(value))
    with slowed():
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    clock.mark()
    (seconds,) = clock.seconds()
    layers.zero_grad(set_to_none=True)
    return seconds


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes an optimizer of the given parameters."""


class Updates:
    """Times updates and copies of all trained parameters; :meth:`restore` undoes the updates.

    Before an update, a pipeline that stashes weights copies those that a minibatch in flight still
    uses. Clipping and hooks are not timed.
    """

    def __init__(
        self, layers: nn.Sequential, make: MakeOptimizer, *, device: torch.device, slowed: Slowed
    ) -> None:
        self._trained = [p for p in layers.parameters() if p.requires_grad]
        self._optimizer = make(self._trained) if self._trained else None
        self._device, self._slowed = device, slowed
        self._before: list[Tensor] = []
        self._room: list[Tensor] = []  # for copies: memory that is reused, as in a pipeline
        self._copies_s: list[float] = []
        self._updates_s: list[float] = []

    def take(self, *, counts: bool = True) -> None:
        """Times a copy of the parameters, then an update with zero gradients.

        The first call allocates memory for copies and the optimizer's state: ``counts`` should be
        False for it, so that its times are dropped.
        """
        if self._optimizer is None:
            return
        if not self._before:
            self._before = [p.detach().to("cpu", copy=True) for p in self._trained]
            self._room = [torch.empty_like(p.detach()) for p in self._trained]
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter)
        clock = Clock(self._device)
        clock.synchronise()
        clock.mark()
        with self._slowed():
            for room, parameter in zip(self._room, self._trained, strict=True):
                room.copy_(parameter.detach())
        clock.mark()
        with self._slowed():
            self._optimizer.step(lambda: 0.0)
        clock.mark()
        if counts:
            copy_s, update_s = clock.seconds()
            self._copies_s.append(copy_s)
            self._updates_s.append(update_s)
        for parameter in self._trained:
            parameter.grad = None

    def restore(self) -> None:
        """Restores the values of the parameters and drops their gradients."""
        with torch.no_grad():
            for parameter, before in zip(self._trained, self._before, strict=False):
                parameter.copy_(before)
                parameter.grad = None

    def shares_s(self, layers: nn.Sequential) -> dict[str, list[float]]:
        """Median seconds of an update (``update_s``) and of a copy (``copy_s``), divided over the
        layers in proportion to the bytes of their trained parameters.
        """
        sizes = own_bytes(layers, trained=True)
        whole = sum(sizes) or 1
        return {
            name: [(median_and_spread(times_s)[0] if times_s else 0.0) * s / whole for s in sizes]
            for name, times_s in (("update_s", self._updates_s), ("copy_s", self._copies_s))
        }


def own_bytes(layers: nn.Sequential, *, trained: bool = False) -> list[int]:
    """Bytes of the parameters of each layer; shared ones count once, for the first layer with them.

    ``trained``: whether only trained parameters count, not frozen ones.
    """
    seen: set[int] = set()
    sizes = []
    for layer in layers:
        own = {id(p): p for p in layer.parameters() if id(p) not in seen}
        sizes.append(sum(p.nbytes for p in own.values() if p.requires_grad or not trained))
        seen |= own.keys()
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Operations or bytes per second: the median and the interquartile range over repeats."""

    per_s: float
    spread_per_s: float


def multiply_speed(device: torch.device, *, size: int, warmups: int, repeats: int) -> Speed:
    """Floating-point operations per second of ``torch.mm`` on two matrices [size, size].

    The matrices are in float32, without TF32. A product counts as 2 size^3 operations.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    out = torch.empty_like(left)
    with multiplying("highest"):
        work = partial(torch.mm, left, right, out=out)
        return _speed(work, 2.0 * size**3, device, warmups=warmups, repeats=repeats)


def copy_speed(device: torch.device, *, size_bytes: int, warmups: int, repeats: int) -> Speed:
    """Bytes per second, read and written together, of a copy within a device's memory.

    The size of the copied tensor, ``size_bytes``, should be much larger than the device's caches.
    """
    source = torch.ones(max(1, size_bytes // 4), device=device)
    target = torch.empty_like(source)
    work = partial(target.copy_, source)
    return _speed(work, 2.0 * source.nbytes, device, warmups=warmups, repeats=repeats)


def _speed(
    work: Callable[[], object], amount: float, device: torch.device, *, warmups: int, repeats: int
) -> Speed:
    for _ in range(warmups):
        work()
    clock = Clock(device)
    clock.synchronise()
    clock.mark()
    for _ in range(repeats):
        work()
        clock.mark()
    per_s, spread_per_s = median_and_spread([amount / time_s for time_s in clock.seconds()])
    return Speed(per_s=per_s, spread_per_s=spread_per_s)
