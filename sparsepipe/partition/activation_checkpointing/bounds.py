"""What recomputing takes at least, for all stages of a chain of layers at once.

As for one stage (``prices.py``): at any price of a byte the shortest way by time and
price is a bound on the time of all choices that have room. Here one pass through the layers finds
these ways from each place to every other. Choices are sorted by the most that is inside of one of
their spans: that leaves less room for what each microbatch in flight keeps.

Shape suffixes: B whether the layer before a place is recomputed (before the first one: as if it
were), 0 or 1; I places a model can be cut at: of the last two the first is a stage's begin and the
second its end; P pairs of these, a stage each.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.activation_checkpointing.span_table import SpanTable
from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost
from sparsepipe.partition.activation_checkpointing.work import Work
from sparsepipe.partition.costs.layers import Floats
from sparsepipe.partition.memory.model import room_bytes

_LEVELS = 12
"""Sorts of choices, by what is inside of a span."""

_PRICES = tuple(4.0**power for power in range(-3, 4))
"""Of a byte, where all layers' time is the price of all their bytes."""

BOUNDS = _LEVELS * (1 + len(_PRICES))
"""Figures of each stage, at most."""

_Few = NDArray[np.float32]


class Bounds:
    """Bounds for the stages of a chain of layers.

    Figures of a sort of choices are made when a stage is asked for that may need it, as long as
    there is work left for them: those with the largest spans first, which bound others as well.

    Args:
        chain: all layers.
        work: that making figures is taken from.
    """

    def __init__(self, chain: StageCost, work: Work) -> None:
        self._chain, self._table = chain, SpanTable(chain, work)
        seconds = sum(layer.forward_s for layer in chain.layers) or 1.0
        plain = sum(layer.saved_bytes for layer in chain.layers) or 1.0
        self._prices = tuple(price * seconds / plain for price in _PRICES)
        inside = sorted({each for row in self._table.spans for _, _, each in row})
        count = min(_LEVELS, len(inside))
        tops = [inside[(number + 1) * len(inside) // count - 1] for number in range(count)]
        self._levels = list(zip([0.0, *tops[:-1]], tops, strict=True))
        self._pairs = np.triu_indices(len(chain.layers) + 1, 1)
        none_P: _Few = np.zeros(len(self._pairs[0]), dtype=np.float32)
        # By price and weight: those of each cap.
        self._made: defaultdict[tuple[float, float], dict[float, _Few]] = defaultdict(
            lambda: {float("inf"): none_P}
        )
        saved_I = np.cumsum([0.0, *(layer.saved_bytes for layer in chain.layers)])
        begin_I = np.array([*(layer.begin_bytes for layer in chain.layers), 0.0])
        end_I = np.array([0.0, *(layer.end_bytes for layer in chain.layers)])
        plain_II = (saved_I + end_I)[None, :] - (saved_I - begin_I)[:, None]
        self._plain_P: Floats = plain_II[self._pairs]

    def seconds_II(self, room_II: Floats, *, in_flight: float) -> Floats:
        """That recomputing adds to a batch, at least; infinite where a stage never fits.

        Args:
            room_II: bytes that each stage has for what backwards need; in units of such a share
                of them as a microbatch is of the batch.
            in_flight: microbatches.
        """
        room_P = room_II[self._pairs] * room_bytes(1.0)  # as much more as a choice may keep
        found_P = np.zeros(room_P.shape)
        lacking = np.flatnonzero(in_flight * self._plain_P > room_P)
        found_P[lacking] = np.inf
        for floor, top in reversed(self._levels):
            # Those that have room for such a span, and for what is kept beside it.
            some = lacking[room_P[lacking] >= floor]
            if not len(some):
                continue
            left_P = (room_P[some] - floor) / in_flight
            fits_P = self._figure(1.0, 0.0, top)[some] <= left_P
            some, left_P = some[fits_P], left_P[fits_P]
            if len(some):
                found_P[some] = np.minimum(found_P[some], self._level_P(top, some, left_P))
        found_II = np.zeros(room_II.shape)
        found_II[self._pairs] = found_P
        return found_II

    def _level_P(self, top: float, some: NDArray[np.intp], left_P: Floats) -> Floats:
        """The same of some stages, by choices whose spans keep to a cap for their inside.

        Args:
            top: the cap.
            some: numbers of the stages.
            left_P: bytes that each microbatch may keep.
        """
        seconds_P = np.zeros(left_P.shape)
        for price in self._prices:
            value_P = self._figure(price, 1.0, top)[some] - price * left_P
            np.maximum(seconds_P, value_P, out=seconds_P)
        return seconds_P

    def _figure(self, price: float, weight: float, cap: float) -> _Few:
        """As :meth:`_between`; less, where no work is left for it: that of a larger cap, or 0."""
        made = self._made[price, weight]
        if cap not in made and self._table.work.may_bound:
            made[cap] = self._between(price, weight, cap)
        return made[min(own for own in made if own >= cap)]

    def _between(self, price: float, weight: float, cap: float) -> _Few:
        """The least of seconds and price of bytes of each stage, or hardly less.

        Args:
            price: of a byte.
            weight: of a second.
            cap: for the inside of a span.
        """
        table, layers = self._table, self._chain.layers
        length, allowed = len(layers), table.allowed(cap)
        pairs = sum(n * (length - place) for place, n in enumerate(allowed))
        table.work.look_at_bounds(length, pairs)
        value_BII = np.full((2, length + 1, length + 1), np.inf)
        ends = np.arange(1, length + 1)
        value_BII[0, ends, ends] = [price * layer.end_bytes for layer in layers]
        value_BII[1, ends, ends] = [price * layer.output_bytes for layer in layers]
        for place, number in reversed(list(enumerate(allowed))):
            rest_BII = value_BII[:, place + 1 :, place + 1 :]
            begun_I = np.full(length - place, np.inf)
            if number:
                seconds = weight * table.seconds[place][:number]
                begun_I = (seconds[:, None] + rest_BII[1, :number]).min(axis=0)
            for before in (0, 1):
                on_I = price * table.layer_bytes[place][before] + rest_BII[0, 0]
                border = price * table.border_bytes[place][before]
                value_BII[before, place, place + 1 :] = np.minimum(on_I, border + begun_I)
        # In half of the memory; what is rounded up is no bound.
        found_P: _Few = np.nextafter(value_BII[1][self._pairs].astype(np.float32), np.float32(0))
        return found_P
