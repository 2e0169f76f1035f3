"""How fast a device computes and how fast its memory is, as data sheets tell; here measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsepipe.profiling.clock import Clock, median_and_spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Operations or bytes a second.

    Attributes:
        per_s: the median.
        spread_per_s: the distance between the quartiles.
    """

    per_s: float
    spread_per_s: float


def multiply_speed(device: torch.device, *, size: int, warmups: int, repeats: int) -> Speed:
    """Floating-point operations a second of a product of two square matrices, by ``torch.mm``.

    In float32, without TF32. A product of n by n takes 2 n^3 operations.

    Args:
        device: that multiplies.
        size: n.
        warmups: products before those that count.
        repeats: products that count.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    out = torch.empty_like(left)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        times_s = _times_s(lambda: torch.mm(left, right, out=out), device, warmups, repeats)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    return _speed(2.0 * size**3, times_s)


def copy_speed(device: torch.device, *, size_bytes: int, warmups: int, repeats: int) -> Speed:
    """Bytes a second that a copy within a device's memory moves: each is read once, written once.

    Args:
        device: whose memory it is.
        size_bytes: of what is copied; far more than caches hold.
        warmups: copies before those that count.
        repeats: copies that count.
    """
    source = torch.ones(max(1, size_bytes // 4), device=device)
    target = torch.empty_like(source)
    times_s = _times_s(lambda: target.copy_(source), device, warmups, repeats)
    return _speed(2.0 * source.nbytes, times_s)


def _times_s(
    work: Callable[[], object], device: torch.device, warmups: int, repeats: int
) -> list[float]:
    for _ in range(warmups):
        work()
    clock = Clock(device)
    clock.synchronise()
    clock.mark()
    for _ in range(repeats):
        work()
        clock.mark()
    return clock.seconds()


def _speed(amount: float, times_s: list[float]) -> Speed:
    per_s, spread_per_s = median_and_spread([amount / time_s for time_s in times_s])
    return Speed(per_s=per_s, spread_per_s=spread_per_s)
