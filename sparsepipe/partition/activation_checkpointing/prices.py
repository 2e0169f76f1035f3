"""The cheapest spans of layers whose inside is below a cap, such that what is kept has room.

Without the room it would be a shortest way through the layers. So bytes get a price, in seconds,
and the shortest way by time and price is found. For any price that is a bound on the time of all
choices that have room (Lagrange); the best price is found by bisection. With these bounds choices
are carried on from layer to layer, as long as no other one beats them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from sparsepipe.partition.activation_checkpointing.span_table import Rest, SpanTable

ROUNDING = 1e-9
"""Share by which sums in another order may differ."""

_FEW = 16
"""Choices for the first layers that the search for a first answer carries on."""

_STEPS = 24
"""Prices that are tried, at most, before the best one lies between two of them."""

_HALVINGS = 7
"""Of the ratio of these two."""

_KEPT, _BEGUN, _GOES_ON = b"\0", b"\1", b"\2"
"""What is done with a layer: it is not recomputed; a span begins with it; it is in one."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Price:
    """The best price of a byte that was found, and some others.

    Attributes:
        bound_s: that no choice with room beats; infinite where there is none.
        values: by price, the best one first: seconds and price of the rests, by B and place.
        least: the fewest bytes, by B and place.
    """

    bound_s: float
    values: tuple[tuple[float, list[list[float]]], ...]
    least: list[list[float]]

    @property
    def best(self) -> float:
        """Seconds for a byte."""
        return self.values[0][0]

    def beyond_s(self, place: int, before: bool, room: float) -> float:
        """What the rest from a place on takes, at least; infinite where it has no room."""
        if self.least[before][place] > room + ROUNDING * abs(room):
            return float("inf")
        found = max(value[before][place] - rate * room for rate, value in self.values)
        return max(0.0, found) * (1 - ROUNDING)


def price_of(table: SpanTable, *, cap: float, room: float, start: float | None = None) -> Price:
    """The price with the best bound.

    Args:
        table: of a stage.
        cap: for the inside of a span.
        room: for what a minibatch in flight keeps.
        start: a price that may be near to it.
    """
    allowed = table.allowed(cap)
    least = table.rest(1.0, weight=0.0, allowed=allowed).value_BI.tolist()
    if least[True][0] > room + ROUNDING * abs(room):
        return Price(bound_s=float("inf"), values=(), least=least)
    rests: list[tuple[float, Rest]] = []

    def too_low(price: float) -> bool:
        """Whether bytes are so cheap that more are kept than there is room for."""
        rests.append((price, table.rest(price, weight=1.0, allowed=allowed)))
        return bool(rests[-1][1].bytes_BI[1, 0] > room)

    low = high = start or _first_price(table)
    if too_low(low):
        while too_low(high := 4 * high) and len(rests) < _STEPS:
            low = high
    else:
        while not too_low(low := low / 4) and len(rests) < _STEPS:
            high = low
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if too_low(middle) else (low, middle)
    rests.sort(key=lambda entry: entry[0] * room - float(entry[1].value_BI[1, 0]))
    values = tuple((price, rest.value_BI.tolist()) for price, rest in rests[:3])
    found = Price(bound_s=0.0, values=values, least=least)
    return replace(found, bound_s=found.beyond_s(0, True, room))


def with_cap_s(table: SpanTable, price: Price, *, cap: float, room: float) -> float:
    """What choices with a span whose inside is just the cap take, at least.

    Args:
        table: of a stage.
        price: for this cap and room.
        cap: for the inside of a span.
        room: for what a minibatch in flight keeps.
    """
    found = (table.through_s(rate, value, cap=cap) - rate * room for rate, value in price.values)
    return max(0.0, *found) * (1 - ROUNDING)


def _first_price(table: SpanTable) -> float:
    """A second for each second and byte of all layers."""
    seconds = table.spans[0][-1][1]
    return (seconds or 1.0) / (sum(kept for kept, _ in table.layer_bytes) or 1.0)


@dataclass(frozen=True, slots=True, order=True)
class Choice:
    """What is done with the first layers; the best of several is the least.

    Attributes:
        time_s: of recomputing them.
        kept_bytes: by a minibatch in flight.
        marks: what is done with each.
    """

    time_s: float
    kept_bytes: float
    marks: bytes


def best_choice(
    table: SpanTable,
    price: Price,
    *,
    cap: float,
    room: float,
    most_s: float,
    is_first: bool,
    any_will_do: bool = False,
) -> Choice | None:
    """The best choice whose spans keep to a cap; None where none has room in the time.

    Where the table's work is done before that is known, it is one that was found, if any.

    Args:
        table: of a stage.
        price: for this cap and room.
        cap: for the inside of a span.
        room: for what a minibatch in flight keeps.
        most_s: that the best one may take.
        is_first: whether no choice is known yet, so that a good one will spare looking at others.
        any_will_do: whether that one is enough.
    """
    first = None
    if is_first:
        first = _carried(table, price, cap=cap, room=room, most_s=most_s, few=_FEW)
        if any_will_do and first is not None:
            return first
        most_s = most_s if first is None else min(most_s, first.time_s * (1 + ROUNDING))
    found = _carried(table, price, cap=cap, room=room, most_s=most_s, few=None)
    return first if found is None else found


def _carried(
    table: SpanTable, price: Price, *, cap: float, room: float, most_s: float, few: int | None
) -> Choice | None:
    """Carries choices on from layer to layer: all that may be the best, or the best few.

    It finds none where the table's work is done before the last layer.
    """
    length = len(table.spans)
    waiting: list[tuple[list[Choice], list[Choice]]] = [([], []) for _ in range(length + 1)]
    waiting[0][True].append(Choice(0.0, 0.0, b""))

    def promise_s(place: int, before: bool, choice: Choice) -> float:
        return choice.time_s + price.beyond_s(place, before, room - choice.kept_bytes)

    for place in range(length):
        for before in (False, True):
            best = _undominated(waiting[place][before])
            waiting[place][before].clear()  # of many layers there are millions
            if few is not None:
                best.sort(key=partial(promise_s, place, before))
            for choice in best[:few]:
                every = _longer(table, choice, place, before, cap)
                table.work.look(len(every))
                if table.work.is_done:
                    return None
                for after, longer in every:
                    end = len(longer.marks)
                    if promise_s(end, after, longer) <= most_s:
                        waiting[end][after].append(longer)
    done = [
        Choice(choice.time_s, choice.kept_bytes + table.last_bytes[after], choice.marks)
        for after in (False, True)
        for choice in waiting[length][after]
    ]
    return min((choice for choice in done if choice.kept_bytes <= room), default=None)


def _longer(
    table: SpanTable, choice: Choice, place: int, before: bool, cap: float
) -> list[tuple[bool, Choice]]:
    """With a layer that is kept, or with a span of any length; and which of the two it is."""
    kept = choice.kept_bytes + table.layer_bytes[place][before]
    found = [(False, Choice(choice.time_s, kept, choice.marks + _KEPT))]
    kept, marks = choice.kept_bytes + table.border_bytes[place][before], choice.marks + _BEGUN
    for _, seconds, inside in table.spans[place]:
        if inside > cap:
            break
        found.append((True, Choice(choice.time_s + seconds, kept, marks)))
        marks += _GOES_ON
    return found


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    """Those that no other one beats in time and in bytes."""
    found: list[Choice] = []
    for choice in sorted(choices):
        if not found or choice.kept_bytes < found[-1].kept_bytes:
            found.append(choice)
    return found


def spans_marked(marks: bytes) -> tuple[range, ...]:
    """The spans of a choice."""
    begins = [n for n, mark in enumerate(marks) if mark == _BEGUN[0]]
    ends = [
        next((n for n in range(b + 1, len(marks)) if marks[n] != _GOES_ON[0]), len(marks))
        for b in begins
    ]
    return tuple(range(begin, end) for begin, end in zip(begins, ends, strict=True))
