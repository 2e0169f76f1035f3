"""The cheapest layers to recompute such that a stage fits its memory.

The most that is inside of a span counts once, and what is kept for each minibatch in flight. So
all caps for the inside are looked at, in halves: for a range of them the smallest one leaves most
room for what is kept, and the largest one allows most spans, which bounds the time of all. Ranges
that are bound to take longer than the best choice so far are left alone; the choice is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from sparsepipe.partition.memory import room_bytes
from sparsepipe.partition.recomputation_search import (
    ROUNDING,
    Choice,
    Price,
    best_choice,
    price_of,
    spans_marked,
    with_cap_s,
)
from sparsepipe.partition.span_table import ANY_S, SpanTable
from sparsepipe.partition.stage_cost import StageCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """The cheapest choice, as far as it was looked for.

    Attributes:
        spans: of the stage's layers, in order; None where none fits, or none in the time.
        least_s: that any takes that fits; infinite where none does.
        looks: at places and at choices that were carried on.
    """

    spans: tuple[range, ...] | None
    least_s: float
    looks: int = 0


def cheapest_spans(stage: StageCost, *, limit_bytes: float) -> tuple[range, ...] | None:
    """The spans to recompute that cost least time of those with which a stage fits.

    Of choices that take as long the one is taken with which a minibatch in flight keeps least; of
    these the one that does not recompute the first layer at which they differ, or begins a span
    with it.

    Args:
        stage: its layers, numbered from 0.
        limit_bytes: for what it keeps for its backwards.

    Returns:
        Spans of the stage's layers, in order; None where even the best choice does not fit.
    """
    return cheapest_within(stage, limit_bytes=limit_bytes, most_s=ANY_S).spans


def cheapest_within(stage: StageCost, *, limit_bytes: float, most_s: float) -> Cheapest:
    """The same where they take no more than a time; it is known sooner where they take more.

    Args:
        stage: its layers, numbered from 0.
        limit_bytes: for what it keeps for its backwards.
        most_s: the time.
    """
    limit = room_bytes(limit_bytes)
    if stage.peak_bytes(()) <= limit:
        return Cheapest(spans=(), least_s=0.0)
    table = SpanTable(stage)
    best: Choice | None = None
    beyond_s = float("inf")  # what those take at least that are left alone for the time's sake
    caps = sorted({inside for spans in table.spans for _, _, inside in spans})
    # Parts of the caps, those that promise most first.
    waiting: list[tuple[float, int, int, Price | None]] = [(0.0, 0, len(caps), None)]
    while waiting:
        bound_s, low, high, price = heappop(waiting)
        within_s = most_s if best is None else min(most_s, best.time_s * (1 + ROUNDING))
        if bound_s > within_s:
            beyond_s = min(beyond_s, bound_s)
            break
        if price is not None and high - low == 1:
            room = (limit - caps[low]) / stage.in_flight
            bound_s = max(bound_s, with_cap_s(table, price, cap=caps[low], room=room))
            found = None  # with less inside of its spans a smaller cap leaves more room
            if bound_s <= within_s:
                found = best_choice(
                    table, price, cap=caps[low], room=room, most_s=within_s, is_first=best is None
                )
                bound_s = max(bound_s, within_s)
            beyond_s = beyond_s if found else min(beyond_s, bound_s)
            best = min((choice for choice in (best, found) if choice is not None), default=None)
            continue
        middle, start = (low + high) // 2, None if price is None else price.best
        for first, end in {(low, middle), (middle, high)} - {(low, low)}:
            room = (limit - caps[first]) / stage.in_flight
            price = price_of(table, cap=caps[end - 1], room=room, start=start)
            if price.bound_s <= within_s:
                heappush(waiting, (price.bound_s, first, end, price))
            else:
                beyond_s = min(beyond_s, price.bound_s)
    if best is None:
        least_s = beyond_s if beyond_s < ANY_S else float("inf")
        return Cheapest(spans=None, least_s=least_s, looks=table.looks)
    return Cheapest(spans=spans_marked(best.marks), least_s=best.time_s, looks=table.looks)
