"""The spans of a stage's layers that may be recomputed, and the shortest ways through them.

Shape suffixes: B whether the layer before a place is recomputed (before the first one: as if it
were), 0 or 1; I places between layers, from before the first to behind the last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost
from sparsepipe.partition.activation_checkpointing.work import Work

ANY_S = 1e300
"""More than any choice takes."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """The best rest from each place on, at a price of bytes; B is the first index.

    Attributes:
        value_BI: seconds, and the price of bytes.
        bytes_BI: that it keeps.
    """

    value_BI: Floats
    bytes_BI: Floats


class SpanTable:
    """What a stage's layers and spans cost.

    Args:
        stage: its layers.
        work: that looking at them is taken from.

    Attributes:
        spans: by first layer: end, seconds and bytes inside of each span, the shortest first.
        seconds: the same seconds, as arrays.
        layer_bytes: by layer and B: what it keeps where it is not recomputed.
        border_bytes: by layer and B: what a span keeps that begins with it.
        last_bytes: by B: what is kept behind the last layer.
        work: see above.
    """

    def __init__(self, stage: StageCost, work: Work) -> None:
        length, self.work = len(stage.layers), work
        work.look_at_spans(length * (length + 1) // 2)
        self.spans: list[list[tuple[int, float, float]]] = []
        for first in range(length):
            seconds, inside = 0.0, stage.inside_bytes(range(first, first))
            row = []
            for end in range(first + 1, length + 1):
                seconds += stage.layers[end - 1].forward_s
                inside += stage.layers[end - 1].saved_bytes
                row.append((end, seconds, inside))
            self.spans.append(row)
        self.layer_bytes = [
            (layer.saved_bytes, layer.saved_bytes + layer.begin_bytes) for layer in stage.layers
        ]
        self.border_bytes = [
            (stage.border_bytes(first, False), stage.border_bytes(first, True))
            for first in range(length)
        ]
        self.last_bytes = stage.last_bytes(False), stage.last_bytes(True)
        self.seconds = [np.array([seconds for _, seconds, _ in row]) for row in self.spans]
        self._inside = [[inside for _, _, inside in row] for row in self.spans]

    def allowed(self, cap: float) -> list[int]:
        """How many of the spans that begin with each layer keep to a cap for their inside."""
        return [bisect_right(row, cap) for row in self._inside]

    def rest(self, price: float, *, weight: float, allowed: Sequence[int]) -> Rest:
        """The least of seconds and bytes from each place on.

        Args:
            price: of a byte.
            weight: of a second.
            allowed: spans for each first layer.
        """
        length = len(self.spans)
        self.work.look(length)
        value_BI = np.zeros((2, length + 1))
        bytes_BI = np.zeros((2, length + 1))
        bytes_BI[:, length] = self.last_bytes
        value_BI[:, length] = price * bytes_BI[:, length]
        for place in reversed(range(length)):
            number, least, after = allowed[place], ANY_S, 0.0
            if number:
                beyond = value_BI[1, place + 1 : place + 1 + number].copy()
                beyond += weight * self.seconds[place][:number]
                best = int(beyond.argmin())
                least, after = float(beyond[best]), float(bytes_BI[1, place + 1 + best])
            for before in (0, 1):
                kept, border = self.layer_bytes[place][before], self.border_bytes[place][before]
                on = price * kept + float(value_BI[0, place + 1])
                if on <= price * border + least:
                    value_BI[before, place] = on
                    bytes_BI[before, place] = kept + bytes_BI[0, place + 1]
                else:
                    value_BI[before, place] = price * border + least
                    bytes_BI[before, place] = border + after
        return Rest(value_BI, bytes_BI)

    def through_s(self, rate: float, value: Sequence[Sequence[float]], *, cap: float) -> float:
        """The least of seconds and price over all ways with a span whose inside is the cap.

        Args:
            rate: price of a byte.
            value: of the best rests at this price, by B and place.
            cap: for the inside of a span; what is inside of one or several of them.
        """
        length = len(self.spans)
        self.work.look(2 * length)
        reach_BI = np.full((2, length + 1), np.inf)
        reach_BI[1, 0] = 0.0
        least = float("inf")
        for place, number in enumerate(self.allowed(cap)):
            on = reach_BI[:, place] + rate * np.array(self.layer_bytes[place])
            reach_BI[0, place + 1] = min(reach_BI[0, place + 1], on.min())
            begun = float((reach_BI[:, place] + rate * np.array(self.border_bytes[place])).min())
            ends = slice(place + 1, place + 1 + number)
            reached = begun + self.seconds[place][:number]
            reach_BI[1, ends] = np.minimum(reach_BI[1, ends], reached)
            for span in reversed(range(number)):
                if self._inside[place][span] < cap:
                    break
                least = min(least, float(reached[span]) + value[True][place + 1 + span])
        return least
