"""The cheapest layers to recompute such that a stage fits its memory.

The most that is inside of a span counts once, and what is kept for each minibatch in flight. So
all caps for the inside are looked at, in halves: for a range of them the smallest one leaves most
room for what is kept, and the largest one allows most spans, which bounds the time of all. Ranges
that are bound to take longer than the best choice so far are left alone; the choice is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush

from sparsepipe.partition.activation_checkpointing.prices import (
    ROUNDING,
    Choice,
    Price,
    best_choice,
    price_of,
    spans_marked,
    with_cap_s,
)
from sparsepipe.partition.activation_checkpointing.span_table import ANY_S, SpanTable
from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost
from sparsepipe.partition.activation_checkpointing.work import Work
from sparsepipe.partition.memory.model import room_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """The cheapest choice, as far as it was looked for.

    Attributes:
        spans: of the stage's layers, in order; None where none fits, none in the time, or none was
            found before the work was done.
        time_s: that they take; infinite where there are none.
        least_s: that any takes that fits; infinite where none does.
    """

    spans: tuple[range, ...] | None
    time_s: float
    least_s: float


NONE_FITS = Cheapest(spans=None, time_s=float("inf"), least_s=float("inf"))
"""Of a stage without any room."""


def cheapest(
    stage: StageCost,
    *,
    limit_bytes: float,
    enough_s: float | None = None,
    work: Work | None = None,
) -> Cheapest:
    """The spans to recompute that cost least time of those with which a stage fits.

    Of choices that take as long the one is taken with which a minibatch in flight keeps least; of
    these the one that does not recompute the first layer at which they differ, or begins a span
    with it.

    Args:
        stage: its layers, numbered from 0.
        limit_bytes: for what it keeps for its backwards.
        enough_s: any choice will do that takes no more, and none is looked for that does: mostly
            that is known long before the cheapest one is.
        work: that it is taken from; where that is done, what was found by then counts. None: there
            is no end of it.
    """
    limit = room_bytes(limit_bytes)
    if stage.peak_bytes(()) <= limit:
        return Cheapest(spans=(), time_s=0.0, least_s=0.0)
    caps = _Caps(SpanTable(stage, Work() if work is None else work), stage, limit, enough_s)
    caps.search()
    if caps.best is None:
        return replace(NONE_FITS, least_s=caps.beyond_s if caps.beyond_s < ANY_S else float("inf"))
    return Cheapest(
        spans=spans_marked(caps.best.marks),
        time_s=caps.best.time_s,
        least_s=min(caps.beyond_s, caps.best.time_s),
    )


class _Caps:
    """All caps for the inside of a stage's spans.

    Args:
        table: of the stage.
        stage: see above.
        limit: for what it keeps, with what may be kept beyond.
        enough_s: see above.

    Attributes:
        best: of the choices that were found.
        beyond_s: that all choices take at least that were left alone.
    """

    def __init__(
        self, table: SpanTable, stage: StageCost, limit: float, enough_s: float | None
    ) -> None:
        self._table, self._work = table, table.work
        self._stage, self._limit, self._any_will_do = stage, limit, enough_s is not None
        self._most_s = ANY_S if enough_s is None else enough_s
        self.best: Choice | None = None
        self.beyond_s = float("inf")
        self._caps = sorted({inside for spans in table.spans for _, _, inside in spans})
        # Ranges of them, those that promise most first.
        self._waiting: list[tuple[float, int, int, Price | None]] = [
            (0.0, 0, len(self._caps), None)
        ]

    def search(self) -> None:
        """Looks at ever smaller ranges, until no other one may have a better choice."""
        while self._waiting:
            bound_s, low, high, price = heappop(self._waiting)
            is_enough = self._any_will_do and self.best is not None
            if bound_s > self._within_s or is_enough or self._work.is_done:
                self.beyond_s = min(self.beyond_s, bound_s)
                return
            if price is not None and high - low == 1:
                self._choose(low, price, bound_s)
            else:
                self._halve(low, high, price)

    @property
    def _within_s(self) -> float:
        """What the best choice may take."""
        known_s = ANY_S if self.best is None else self.best.time_s * (1 + ROUNDING)
        return min(self._most_s, known_s)

    def _room(self, number: int) -> float:
        """For what each minibatch in flight keeps, where so much is inside of a span."""
        return (self._limit - self._caps[number]) / self._stage.in_flight

    def _halve(self, low: int, high: int, price: Price | None) -> None:
        middle, start = (low + high) // 2, None if price is None else price.best
        for first, end in {(low, middle), (middle, high)} - {(low, low)}:
            cap, room = self._caps[end - 1], self._room(first)
            own = price_of(self._table, cap=cap, room=room, start=start)
            if own.bound_s <= self._within_s:
                heappush(self._waiting, (own.bound_s, first, end, own))
            else:
                self.beyond_s = min(self.beyond_s, own.bound_s)

    def _choose(self, number: int, price: Price, bound_s: float) -> None:
        """Looks for the best choice with one cap."""
        cap, room, within_s = self._caps[number], self._room(number), self._within_s
        # With less inside of its spans a smaller cap leaves more room.
        bound_s = max(bound_s, with_cap_s(self._table, price, cap=cap, room=room))
        found = None
        if bound_s <= within_s:
            found = best_choice(
                self._table,
                price,
                cap=cap,
                room=room,
                most_s=within_s,
                is_first=self.best is None,
                any_will_do=self._any_will_do,
            )
        if self._work.is_done or (self._any_will_do and found is not None):
            self.beyond_s = min(self.beyond_s, bound_s)  # not all of them were looked at
        elif found is None:
            self.beyond_s = min(self.beyond_s, max(bound_s, within_s))
        if found is not None:
            self.best = found if self.best is None else min(self.best, found)
