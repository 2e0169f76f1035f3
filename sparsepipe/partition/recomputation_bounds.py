"""What recomputing takes at least, for all stages of a chain of layers at once.

As for one stage (``recomputation_search.py``): at any price of a byte the shortest way by time and
price is a bound on the time of all choices that have room. Here one pass through the layers finds
these ways from each place to every other. Choices are sorted by the most that is inside of one of
their spans: that leaves less room for what each microbatch in flight keeps.

Shape suffixes: B whether the layer before a place is recomputed (before the first one: as if it
were), 0 or 1; I places a model can be cut at: of the last two the first is a stage's begin and the
second its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsepipe.partition.memory import room_bytes
from sparsepipe.partition.span_table import SpanTable
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.stage_cost import StageCost

_LEVELS = 12
"""Sorts of choices, by what is inside of a span."""
_PRICES = tuple(4.0**power for power in range(-6, 7))
"""Of a byte, where all layers' time is the price of all their bytes."""
BOUNDS = _LEVELS * (1 + len(_PRICES))
"""Figures that are kept of each stage."""


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Choices with a span whose inside is large, and none with a larger one.

    Attributes:
        floor: less is inside of no such choice's largest span.
        least_II: the fewest bytes that a stage keeps, a whole batch in flight.
        prices: of a byte.
        values_II: seconds and price at each of them.
    """

    floor: float
    least_II: Floats
    prices: tuple[float, ...]
    values_II: tuple[Floats, ...]


class Bounds:
    """Bounds for the stages of a chain of layers.

    Args:
        chain: all layers.
    """

    def __init__(self, chain: StageCost) -> None:
        self._chain, self._table = chain, SpanTable(chain)
        seconds = sum(layer.forward_s for layer in chain.layers) or 1.0
        prices = tuple(p * seconds / (self._plain_bytes() or 1.0) for p in _PRICES)
        inside = sorted({each for row in self._table.spans for _, _, each in row})
        count = min(_LEVELS, len(inside))
        tops = [inside[(number + 1) * len(inside) // count - 1] for number in range(count)]
        self._levels = [
            _Level(
                floor=floor,
                least_II=self._between(price=1.0, weight=0.0, cap=top),
                prices=prices,
                values_II=tuple(self._between(price=p, weight=1.0, cap=top) for p in prices),
            )
            for floor, top in zip([0.0, *tops[:-1]], tops, strict=True)
        ]
        saved_I = np.cumsum([0.0, *(layer.saved_bytes for layer in chain.layers)])
        begin_I = np.array([*(layer.begin_bytes for layer in chain.layers), 0.0])
        end_I = np.array([0.0, *(layer.end_bytes for layer in chain.layers)])
        self._plain_II: Floats = (saved_I + end_I)[None, :] - (saved_I - begin_I)[:, None]

    def seconds_II(self, room_II: Floats, *, flying: float) -> Floats:
        """That recomputing adds to a batch, at least; infinite where a stage never fits.

        Args:
            room_II: bytes that each stage has for what backwards need; in units of such a share
                of them as a microbatch is of the batch.
            flying: microbatches in flight.
        """
        room_II = room_II * room_bytes(1.0)  # as much more as a choice may keep
        found_II = np.full(room_II.shape, np.inf)
        for level in self._levels:
            left_II = (room_II - level.floor) / flying
            seconds_II = np.zeros(room_II.shape)
            for price, value_II in zip(level.prices, level.values_II, strict=True):
                np.maximum(seconds_II, value_II - price * left_II, out=seconds_II)
            seconds_II[level.least_II > left_II] = np.inf
            np.minimum(found_II, seconds_II, out=found_II)
        found_II[flying * self._plain_II <= room_II] = 0.0
        return found_II

    def _plain_bytes(self) -> float:
        return sum(layer.saved_bytes for layer in self._chain.layers)

    def _between(self, *, price: float, weight: float, cap: float) -> Floats:
        """The least of seconds and price of bytes of each stage; 0 where there is none.

        Args:
            price: of a byte.
            weight: of a second.
            cap: for the inside of a span.
        """
        table, layers = self._table, self._chain.layers
        length = len(layers)
        value_BII = np.full((2, length + 1, length + 1), np.inf)
        ends = np.arange(1, length + 1)
        value_BII[0, ends, ends] = [price * layer.end_bytes for layer in layers]
        value_BII[1, ends, ends] = [price * layer.output_bytes for layer in layers]
        for place, number in reversed(list(enumerate(table.allowed(cap)))):
            rest_BII = value_BII[:, place + 1 :, place + 1 :]
            begun_I = np.full(length - place, np.inf)
            if number:
                seconds = np.array([s for _, s, _ in table.spans[place][:number]])
                begun_I = (weight * seconds[:, None] + rest_BII[1, :number]).min(axis=0)
            for before in (0, 1):
                on_I = price * table.layer_bytes[place][before] + rest_BII[0, 0]
                border = price * table.border_bytes[place][before]
                value_BII[before, place, place + 1 :] = np.minimum(on_I, border + begun_I)
        found_II: Floats = value_BII[1]
        return np.where(np.isfinite(found_II), found_II, 0.0)
