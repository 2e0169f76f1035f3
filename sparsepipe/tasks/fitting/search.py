"""The largest batch size that fits, as a search over any oracle. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Where a search has ended.

    Attributes:
        largest: the largest size that was seen to fit; 0 where none did.
        refused: the smallest size that was seen not to; None where all did that were allowed.
    """

    largest: int
    refused: int | None


def largest_that_fits(
    fits: Callable[[int], bool], *, most: int, start: int = 1, precision: float = 0.0
) -> Found:
    """Doubles from ``start`` until a size does not fit, then bisects.

    What is asked depends on the answers alone, so that a search whose answers were kept goes on
    where it was. Each size is asked for once at most. Where fitting is not monotonic, the largest
    size is still one that fits, and the refused one does not.

    Args:
        fits: whether a size does.
        most: sizes above are not asked for; 1 or more.
        start: the first size, 1 or more.
        precision: how much larger than what fits the refused size may be, as a share of it; at 0
            it is larger by one.
    """
    assert most >= 1
    assert start >= 1
    low, high = 0, None
    size = min(start, most)
    while high is None and low < most:
        if fits(size):
            low, size = size, min(2 * size, most)
        else:
            high = size
    while high is not None and high - low > max(1, int(precision * low)):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return Found(largest=low, refused=high)
