"""How much of their time stages wait: the bubble of a pipeline. Pure.

Times are in any unit. What a rank computes are intervals that do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

Interval = tuple[float, float]
"""Begin and end."""
Busy = Sequence[Interval]
"""What one rank computes."""


def idle_shares(ranks: Sequence[Busy], *, begin: float, end: float) -> list[float]:
    """Of each rank, the share of a time in which it computes nothing.

    Args:
        ranks: what each computes; what lies outside of the time does not count.
        begin: of the time.
        end: of it, later than its begin.
    """
    assert end > begin, (begin, end)

    def busy(intervals: Busy) -> float:
        return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in intervals)

    return [1 - busy(intervals) / (end - begin) for intervals in ranks]


def bubbles(ranks: Sequence[Busy]) -> list[float]:
    """Of each rank, the share in which it waits while a minibatch is in the pipeline.

    That is from the begin of its first forward to the end of its last backward, after which
    updates come.

    Args:
        ranks: forwards and backwards of one minibatch on each rank; updates are none of them.
    """
    every = [interval for intervals in ranks for interval in intervals]
    assert every, "nobody computes anything"
    begin, end = min(a for a, _ in every), max(b for _, b in every)
    return idle_shares(ranks, begin=begin, end=end)
