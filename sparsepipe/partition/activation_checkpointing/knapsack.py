"""The cheapest layers of a stage to recompute such that the stage fits its memory: a knapsack.

A walk through the layers keeps each one's activations, or begins a span that is recomputed. Of the
choices that lead to a place only those are carried on that no other one beats in both the bytes
that a minibatch in flight keeps and the seconds of recomputing; where there are too many of these,
the most promising for each part of the time. What is inside of the largest span counts once beside
that, so that the walk is made for several caps of it.

With as many caps as there are sizes of spans and with all choices carried on, which is so for small
stages, the result is exact. Else a choice may be missed that takes less time.

Shape suffixes: A rows, each of which is a walk from a place with a cap; K choices of a row, with
more bytes and less time from one to the next, and infinite bytes where there are fewer; I places a
model can be cut at, of two the first is where a stage begins and the second where it ends; C caps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np

from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost
from sparsepipe.partition.costs.layers import Bools, Floats, Ints
from sparsepipe.partition.memory.model import room_bytes

_MOST_CAPS = 64
_MOST_CHOICES = 64
_FEWEST_CAPS = 12
_FEWEST_CHOICES = 16
_SORTED_AT_MOST = 12_000_000
"""Choices that a knapsack sorts, at most, as long as there are more than the fewest caps and
choices: about two seconds on one core."""
_ROUNDING = 1e-12
"""Share by which sums in another order may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The cheapest layers of a stage to recompute.

    Attributes:
        spans: of its layers, numbered from 0 and in order.
        time_s: that recomputing them takes for each minibatch.
    """

    spans: tuple[range, ...]
    time_s: float


def cheapest(stage: StageCost, *, limit_bytes: float) -> Recomputation | None:
    """The spans to recompute that cost least time of those with which a stage fits.

    Of choices that take as long the one is taken with which a minibatch in flight keeps least.

    Returns:
        None where none of the choices that were looked at fits.
    """
    knapsack = Knapsack.of_stage(stage)
    return knapsack.cheapest(0, len(stage.layers), limit_bytes, in_flight=stage.in_flight)


_At: TypeAlias = tuple[float, float, float]
"""Bytes, seconds and most bytes in a span of one choice."""


@dataclass(frozen=True, slots=True, eq=False)
class _Choices:
    """Choices by row: bytes that a minibatch in flight keeps, seconds, and most bytes in a span."""

    bytes_AK: Floats
    time_s_AK: Floats
    inside_AK: Floats

    @classmethod
    def none(cls, rows: int) -> Self:
        return cls(*(np.empty((rows, 0)) for _ in range(3)))

    @classmethod
    def start(cls, rows: int) -> Self:
        return cls(*(np.zeros((rows, 1)) for _ in range(3)))

    def plus(self, num_bytes: float, time_s: float = 0.0) -> _Choices:
        return _Choices(self.bytes_AK + num_bytes, self.time_s_AK + time_s, self.inside_AK)

    def best(self, most: int, slack_s: float) -> _Choices:
        """Those that no other one of the row beats; of many about so many (:func:`_thinned`)."""
        if not self.bytes_AK.shape[1]:
            return self
        order_AK = self.bytes_AK.argsort(axis=1, kind="stable")
        bytes_AK = np.take_along_axis(self.bytes_AK, order_AK, axis=1)
        time_s_AK = np.take_along_axis(self.time_s_AK, order_AK, axis=1)
        least_s_AK = np.minimum.accumulate(time_s_AK, axis=1)
        is_best_AK = np.isfinite(bytes_AK)
        is_best_AK[:, 1:] &= time_s_AK[:, 1:] < least_s_AK[:, :-1] - slack_s
        rows, places = np.nonzero(is_best_AK)
        if len(rows) and np.bincount(rows).max() > most:
            taken = _thinned(rows, bytes_AK[is_best_AK], time_s_AK[is_best_AK], most)
            rows, places = rows[taken], places[taken]
        columns = np.arange(len(rows)) - np.searchsorted(rows, rows)
        shape = len(bytes_AK), 1 + int(columns.max(initial=0))
        found = _Choices(*(np.full(shape, np.inf) for _ in range(3)))
        found.bytes_AK[rows, columns] = bytes_AK[rows, places]
        found.time_s_AK[rows, columns] = time_s_AK[rows, places]
        found.inside_AK[rows, columns] = self.inside_AK[rows, order_AK[rows, places]]
        return found

    def at(self, row: int, choice: int) -> _At:
        return (
            float(self.bytes_AK[row, choice]),
            float(self.time_s_AK[row, choice]),
            float(self.inside_AK[row, choice]),
        )

    def fit_AK(self, room_A: Floats, in_flight: float) -> Bools:
        """Which choices fit the memory of a device."""
        return np.asarray(in_flight * self.bytes_AK + self.inside_AK <= room_A[:, None])


def _thinned(rows: Ints, num_bytes: Floats, time_s: Floats, most: int) -> Ints:
    """Thins the best choices of each row: keeps the first, the last, and in each part of the row's
    time the one with the least sum of shares of bytes and seconds.
    """
    first, last = np.searchsorted(rows, rows), np.searchsorted(rows, rows, side="right") - 1
    place = np.arange(len(rows))
    spread_bytes = np.maximum(num_bytes[last] - num_bytes[first], 1e-300)
    spread_s = np.maximum(time_s[first] - time_s[last], 1e-300)
    spent = (num_bytes - num_bytes[first]) / spread_bytes
    saved = (time_s[first] - time_s) / spread_s
    part = np.where(last - first < most, place - first, np.floor(saved * (most - 2)))
    part = np.where(place == first, -1, np.where(place == last, len(rows), part))
    begins = np.flatnonzero(np.append(True, (part[1:] != part[:-1]) | (rows[1:] != rows[:-1])))
    least = np.minimum.reduceat(spent - saved, begins)
    is_least = spent - saved == np.repeat(least, np.diff([*begins, len(rows)]))
    return np.flatnonzero(is_least)


def _together(parts: Sequence[_Choices], rows: int) -> _Choices:
    """All choices of some rows, the last of which may be missing in a part."""
    shape = rows, sum(part.bytes_AK.shape[1] for part in parts)
    found = _Choices(*(np.full(shape, np.inf) for _ in range(3)))
    column = 0
    for part in parts:
        there, width = part.bytes_AK.shape
        columns = slice(column, column := column + width)
        found.bytes_AK[:there, columns] = part.bytes_AK
        found.time_s_AK[:there, columns] = part.time_s_AK
        found.inside_AK[:there, columns] = part.inside_AK
    return found


class Knapsack:
    """The cheapest layers to recompute of any stage of a chain of layers.

    Args:
        num_caps: C, at most.
        num_choices: K, at most.
    """

    def __init__(self, chain: StageCost, *, num_caps: int, num_choices: int) -> None:
        self._chain, self._most = chain, num_choices
        length = len(chain.layers)
        self._until_s_I = np.cumsum([0.0, *(layer.forward_s for layer in chain.layers)])
        self._slack_s = _ROUNDING * float(self._until_s_I[-1])
        saved_I = np.cumsum([0.0, *(layer.saved_bytes for layer in chain.layers)])
        begin_I = np.array([layer.begin_bytes for layer in chain.layers])
        anew_I = [chain.inside_bytes(range(first, first)) for first in range(length)]
        self._inside_II = saved_I[None, :] - saved_I[:-1, None] + np.array(anew_I)[:, None]
        sizes = np.unique(self._inside_II[np.triu_indices(length, 1, length + 1)])
        places = np.linspace(0, len(sizes) - 1, min(num_caps, len(sizes)))
        self._caps_C: Floats = sizes[np.ceil(places).astype(np.intp)]
        end_I = [layer.end_bytes for layer in chain.layers]
        self._plain_II = (saved_I[1:] + end_I)[None, :] - (saved_I[:-1] - begin_I)[:, None]
        self._ends: dict[int, _Choices] = {}

    @classmethod
    def of_chain(cls, chain: StageCost) -> Self:
        """A knapsack for stages that begin and end anywhere, as precise as two seconds allow."""
        most = 6 * _SORTED_AT_MOST / len(chain.layers) ** 3
        return cls(chain, num_caps=_caps(most), num_choices=_choices(most))

    @classmethod
    def of_stage(cls, stage: StageCost) -> Self:
        """A knapsack for one stage, as precise as about two seconds allow."""
        most = 2 * _SORTED_AT_MOST / len(stage.layers) ** 2
        return cls(stage, num_caps=_caps(most), num_choices=_choices(most))

    def seconds_II(self, room_II: Floats, *, in_flight: float) -> Floats:
        """Seconds of recomputing for each stage; infinite where the stage does not fit the memory
        for its backwards.
        """
        length, caps = len(self._chain.layers), len(self._caps_C)
        if not self._ends:
            begins_A = np.repeat(np.arange(length), caps)
            walk = _Walk(self, begins_A, np.tile(self._caps_C, length))
            self._ends = {end: walk.go_on(end) for end in range(1, length + 1)}
        found_II = np.zeros(room_II.shape)
        for end, choices in self._ends.items():
            room_I1 = room_bytes(1.0) * room_II[:end, end, None]
            fits_AK = choices.fit_AK(np.repeat(room_I1[:, 0], caps), in_flight)
            time_s_AK = np.where(fits_AK, choices.time_s_AK, np.inf)
            seconds_I = time_s_AK.min(axis=1).reshape(end, caps).min(axis=1)
            fits_I = in_flight * self._plain_II[:end, end - 1] <= room_I1[:, 0]
            found_II[:end, end] = np.where(fits_I, 0.0, np.maximum(seconds_I, 0.0))
        return found_II

    def cheapest(
        self, first: int, end: int, limit_bytes: float, *, in_flight: float
    ) -> Recomputation | None:
        """The choice whose seconds :meth:`seconds_II` returns."""
        limit = room_bytes(limit_bytes)
        if in_flight * self._plain_II[first, end - 1] <= limit:
            return Recomputation(spans=(), time_s=0.0)
        walk = _Walk(self, np.full(len(self._caps_C), first), self._caps_C)
        for place in range(first + 1, end + 1):
            choices = walk.go_on(place)
        fits_AK = choices.fit_AK(np.full(len(self._caps_C), limit), in_flight)
        if not fits_AK.any():
            return None
        least_s = choices.time_s_AK[fits_AK].min() + self._slack_s
        fits_AK &= choices.time_s_AK <= least_s
        best = int(np.where(fits_AK, choices.bytes_AK, np.inf).argmin())
        spans = walk.spans(end, *divmod(best, fits_AK.shape[1]))
        time_s = sum(self._chain.layers[layer].forward_s for span in spans for layer in span)
        return Recomputation(
            spans=tuple(range(span.start - first, span.stop - first) for span in spans),
            time_s=time_s,
        )


class _Walk:
    """The choices of some rows, from place to place."""

    def __init__(self, knapsack: Knapsack, begins_A: Ints, caps_A: Floats) -> None:
        self._knapsack, self._chain = knapsack, knapsack._chain
        self._begins_A, self._caps_A = begins_A, caps_A
        self._first = int(begins_A[0])
        # By place: where the layer before it is kept, and where it is recomputed.
        self._kept: dict[int, _Choices] = {}
        self._again: dict[int, _Choices] = {}
        self._begun: dict[int, _Choices] = {}  # a span begins at the place; without its seconds
        self._set(self._first, _Choices.none(0), _Choices.none(0))

    def _best(self, parts: Sequence[_Choices], rows: int) -> _Choices:
        knapsack = self._knapsack
        return _together(parts, rows).best(knapsack._most, knapsack._slack_s)

    def _set(self, place: int, kept: _Choices, again: _Choices) -> None:
        """Sets the choices up to a place; rows begin as if the layer before were recomputed."""
        before = len(again.bytes_AK)
        rows = int(np.searchsorted(self._begins_A, place, side="right"))
        self._kept[place] = kept
        start = _Choices.start(rows)
        start.bytes_AK[:before] = np.inf
        start.time_s_AK[:before] = np.inf
        self._again[place] = _together([again, start], rows) if rows > before else again
        if place < len(self._chain.layers):
            parts = self._border(place)
            begun = self._best(parts, rows)
            self._begun[place] = begun.plus(0.0, -float(self._knapsack._until_s_I[place]))

    def _border(self, place: int) -> list[_Choices]:
        """Choices that begin a span at a place."""
        return [
            self._kept[place].plus(self._chain.border_bytes(place, False)),
            self._again[place].plus(self._chain.border_bytes(place, True)),
        ]

    def _layer(self, place: int) -> list[_Choices]:
        """Choices that keep the layer before a place."""
        layer = self._chain.layers[place - 1]
        return [
            self._kept[place - 1].plus(layer.saved_bytes),
            self._again[place - 1].plus(layer.saved_bytes + layer.begin_bytes),
        ]

    def _spans_to(self, place: int) -> dict[int, _Choices]:
        knapsack, found = self._knapsack, {}
        for begin in range(self._first, place):
            begun, inside = self._begun[begin], knapsack._inside_II[begin, place]
            too_large_A = self._caps_A[: len(begun.bytes_AK)] < inside
            if too_large_A.all():
                continue
            longer = begun.plus(0.0, float(knapsack._until_s_I[place]))
            longer.bytes_AK[too_large_A] = np.inf
            longer.time_s_AK[too_large_A] = np.inf
            inside_AK = np.maximum(longer.inside_AK, inside)
            found[begin] = _Choices(longer.bytes_AK, longer.time_s_AK, inside_AK)
        return found

    def _end(self, place: int, kept: _Choices, again: _Choices) -> list[_Choices]:
        """Choices of stages that end at a place."""
        layer = self._chain.layers[place - 1]
        return [kept.plus(layer.end_bytes), again.plus(layer.output_bytes)]

    def go_on(self, place: int) -> _Choices:
        """The choices of stages that end at the next place."""
        rows = int(np.searchsorted(self._begins_A, place, side="left"))
        kept = self._best(self._layer(place), rows)
        again = self._best([*self._spans_to(place).values()], rows)
        self._set(place, kept, again)
        return self._best(self._end(place, kept, again), rows)

    def spans(self, end: int, row: int, choice: int) -> list[range]:
        """The spans of one of the choices that :meth:`go_on` has found last."""
        kept, again = self._kept[end], self._again[end]
        found = self._best(self._end(end, kept, again), len(self._begins_A))
        at = found.at(row, choice)
        spans: list[range] = []
        is_again, at = self._nearest(self._end(end, kept, again), [kept, again], row, at)
        place = end
        while place > self._first:
            if is_again:
                ways = self._spans_to(place)
                begin, at = self._nearest([*ways.values()], [self._begun[b] for b in ways], row, at)
                begin = list(ways)[begin]
                spans.insert(0, range(begin, place))
                place = begin
                at = at[0], at[1] + float(self._knapsack._until_s_I[place]), at[2]
                longer = self._border(place)
            else:
                longer = self._layer(place)
                place -= 1
            is_again, at = self._nearest(longer, [self._kept[place], self._again[place]], row, at)
        return spans

    def _nearest(
        self,
        longer: Sequence[_Choices],
        shorter: Sequence[_Choices],
        row: int,
        at: _At,
    ) -> tuple[int, _At]:
        """The transition, and the choice before it, that led to these bytes and seconds."""
        best = float("inf"), 0, 0
        for number, each in enumerate(longer):
            if row >= len(each.bytes_AK) or not each.bytes_AK.shape[1]:
                continue
            far_K = abs(each.bytes_AK[row] - at[0]) / (abs(at[0]) or 1.0)
            far_K += abs(each.time_s_AK[row] - at[1]) / (float(self._knapsack._until_s_I[-1]) or 1)
            far_K += abs(each.inside_AK[row] - at[2]) / (abs(at[2]) or 1.0)
            far_K = np.where(np.isfinite(each.bytes_AK[row]), far_K, np.inf)
            nearest = int(far_K.argmin())
            best = min(best, (float(far_K[nearest]), number, nearest))
        distance, number, nearest = best
        assert distance < 1e-6, "each choice was reached from another one"
        return number, shorter[number].at(row, nearest)


def sorted_choices(num_layers: int) -> float:
    """How many choices the knapsack of a chain of layers sorts, about."""
    most = 6 * _SORTED_AT_MOST / num_layers**3
    return _caps(most) * _choices(most) * num_layers**3 / 6


def _caps(most: float) -> int:
    return int(min(_MOST_CAPS, max(_FEWEST_CAPS, most**0.5)))


def _choices(most: float) -> int:
    return int(min(_MOST_CHOICES, max(_FEWEST_CHOICES, most / _caps(most))))
