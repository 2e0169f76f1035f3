"""The cheapest layers to recompute such that a stage fits its memory.

The most that is inside of a span counts once, and what is kept for each minibatch in flight. So
all caps for the inside are looked at, in halves: for a range of them the smallest one leaves most
room for what is kept, and the largest one allows most spans, which bounds the time of all. Ranges
that are bound to take longer than the best choice so far are left alone; the choice is exact.
"""

from __future__ import annotations

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
    limit = room_bytes(limit_bytes)
    if stage.peak_bytes(()) <= limit:
        return ()
    table = SpanTable(stage)
    best: Choice | None = None
    caps = sorted({inside for spans in table.spans for _, _, inside in spans})
    # Parts of the caps, those that promise most first.
    waiting: list[tuple[float, int, int, Price | None]] = [(0.0, 0, len(caps), None)]
    while waiting:
        bound_s, low, high, price = heappop(waiting)
        most_s = ANY_S if best is None else best.time_s * (1 + ROUNDING)
        if bound_s > most_s:
            break
        if price is not None and high - low == 1:
            room = (limit - caps[low]) / stage.in_flight
            if with_cap_s(table, price, cap=caps[low], room=room) > most_s:
                continue  # with less inside of its spans a smaller cap leaves more room
            found = best_choice(table, price, cap=caps[low], room=room, most_s=most_s)
            best = min((choice for choice in (best, found) if choice is not None), default=None)
            continue
        middle, start = (low + high) // 2, None if price is None else price.best
        for first, end in {(low, middle), (middle, high)} - {(low, low)}:
            room = (limit - caps[first]) / stage.in_flight
            price = price_of(table, cap=caps[end - 1], room=room, start=start)
            if price.bound_s <= most_s:
                heappush(waiting, (price.bound_s, first, end, price))
    return None if best is None else spans_marked(best.marks)
