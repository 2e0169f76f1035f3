"""The cheapest layers of a stage to recompute such that the stage fits its memory.

With a price for each byte that a minibatch in flight keeps, and a cap on the bytes inside of the
largest span, the best choice of spans is a shortest path through the layers. The paths for a number
of prices and caps are found together; the quickest one that fits is taken, and its spans then give
layers back, those that save most time first, for as long as the stage fits. A choice may be missed
that takes a few percent less time.

Shape suffixes: I places a model can be cut at, of two the first is where a stage begins and the
second where it ends; F first layers of stages, P prices, C caps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost
from sparsepipe.partition.costs.layers import Floats
from sparsepipe.partition.memory.model import room_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Layers of a stage to recompute.

    Attributes:
        spans: spans of its layers, numbered from 0 and in order.
        time_s: seconds of recomputing them for each minibatch.
    """

    spans: tuple[range, ...]
    time_s: float


def cheapest(stage: StageCost, *, limit_bytes: float) -> Recomputation | None:
    """The quickest known spans to recompute with which a stage fits; None where none fits."""
    length = len(stage.layers)
    return SpanChoices(stage).cheapest(0, length, limit_bytes, in_flight=stage.in_flight)


Paths = NDArray[np.float64]
"""Paths [4, F, P, C] to a place: cost, bytes kept, seconds, and most bytes in a span."""


class SpanChoices:
    """Choices of spans for all stages of a chain of layers."""

    def __init__(self, chain: StageCost) -> None:
        self._chain = chain
        layers, length = chain.layers, len(chain.layers)
        self._until_s_I = np.cumsum([0.0, *(layer.forward_s for layer in layers)])
        saved_I = np.cumsum([0.0, *(layer.saved_bytes for layer in layers)])
        begin_I = np.array([layer.begin_bytes for layer in layers])
        end_I = np.array([layer.end_bytes for layer in layers])
        anew_I = np.array([chain.inside_bytes(range(first, first)) for first in range(length)])
        self._inside_II = saved_I[None, :] - saved_I[:-1, None] + anew_I[:, None]
        self._plain_II = (saved_I[1:] + end_I)[None, :] - (saved_I[:-1] - begin_I)[:, None]
        sizes = np.unique(self._inside_II[np.triu_indices(length, 1, length + 1)])
        places = np.linspace(0, len(sizes) - 1, min(len(sizes), max(12, min(64, 1600 // length))))
        self._caps_C: Floats = sizes[np.ceil(places).astype(np.intp)]
        # From bytes alone, ties by seconds, to seconds nearly alone.
        seconds, kept = float(self._until_s_I[-1]) or 1.0, float(saved_I[-1]) or 1.0
        self._second_cost_P = np.array([1e-9, *np.geomspace(1e-3, 1e3, 47)]) / seconds
        self._byte_cost = 1.0 / kept
        self._ends: list[Paths] = []

    def seconds_II(self, room_II: Floats, *, in_flight: float) -> Floats:
        """Seconds of recomputing for each stage, before spans give layers back.

        They are infinite where the stage does not fit the memory for its backwards.
        """
        length = len(self._chain.layers)
        if not self._ends:
            self._ends = self._walk(range(length), length)
        found_II = np.zeros(room_II.shape)
        for end, paths in enumerate(self._ends, 1):
            room_F = room_bytes(1.0) * room_II[:end, end]
            _, kept, time_s, inside = paths[:, :end]
            fits_FPC = in_flight * kept + inside <= room_F[:, None, None]
            seconds_F = np.where(fits_FPC, time_s, np.inf).min(axis=(1, 2))
            is_plain_F = in_flight * self._plain_II[:end, end - 1] <= room_F
            found_II[:end, end] = np.where(is_plain_F, 0.0, seconds_F)
        return found_II

    def cheapest(
        self, first: int, end: int, limit_bytes: float, *, in_flight: float
    ) -> Recomputation | None:
        """Spans of the stage from ``first`` to before ``end``; None where none are known to fit."""
        limit = room_bytes(limit_bytes)
        if in_flight * self._plain_II[first, end - 1] <= limit:
            return Recomputation(spans=(), time_s=0.0)
        paths = self._walk(range(first, first + 1), end, marks=end)[-1][:, 0]
        fits_PC = in_flight * paths[1] + paths[3] <= limit
        stage = StageCost(
            layers=self._chain.layers[first:end],
            input_bytes=self._chain.border_bytes(first, True),
            in_flight=in_flight,
        )
        found = [
            _given_back(stage, _spans(marks), limit)
            for marks in np.unique(paths[4 + first :, fits_PC], axis=1).T
        ]
        if not found:
            return None
        best = min(found, key=lambda spans: (stage.time_s(spans), stage.kept_bytes(spans)))
        return Recomputation(spans=tuple(best), time_s=stage.time_s(best))

    def _walk(self, firsts: range, last: int, *, marks: int = 0) -> list[Paths]:
        """The best paths of stages that begin at each of ``firsts``, to each end up to ``last``.

        With ``marks`` behind the figures of a path there is for each layer what happens to it.
        """
        chain, ends, begun = self._chain, list[Paths](), dict[int, Paths]()
        shape = 4 + marks, len(firsts), len(self._second_cost_P), len(self._caps_C)
        kept, again = np.full(shape, np.inf), np.full(shape, np.inf)
        for place in range(firsts.start, last + 1):
            if place > firsts.start:
                layer = chain.layers[place - 1]
                kept = _better(
                    self._plus(kept, layer.saved_bytes),
                    self._plus(again, layer.saved_bytes + layer.begin_bytes),
                )
                again = np.full(shape, np.inf)
                for begin, paths in begun.items():
                    seconds = float(self._until_s_I[place] - self._until_s_I[begin])
                    inside = self._inside_II[begin, place]
                    longer = self._plus(paths, 0.0, seconds)
                    longer[0] = np.where(self._caps_C < inside, np.inf, longer[0])
                    longer[3] = np.maximum(longer[3], inside)
                    if marks:
                        longer[4 + begin], longer[5 + begin : 4 + place] = _STARTS, _GOES_ON
                    again = _better(again, longer)
                ends.append(
                    _better(
                        self._plus(kept, layer.end_bytes), self._plus(again, layer.output_bytes)
                    )
                )
            if place in firsts:  # as if the layer before were recomputed
                again[:, place - firsts.start] = 0.0
            if place < last:
                begun[place] = _better(
                    self._plus(kept, chain.border_bytes(place, False)),
                    self._plus(again, chain.border_bytes(place, True)),
                )
        return ends

    def _plus(self, paths: Paths, num_bytes: float, time_s: float = 0.0) -> Paths:
        longer = paths.copy()
        longer[0] += self._byte_cost * num_bytes + (self._second_cost_P * time_s)[:, None]
        longer[1] += num_bytes
        longer[2] += time_s
        return longer


_STARTS, _GOES_ON = 2.0, 1.0
"""Marks of a layer that starts a span, and of one that a span goes on with."""


def _better(one: Paths, other: Paths) -> Paths:
    return np.where(one[0] <= other[0], one, other)


def _spans(marks: Floats) -> list[range]:
    starts = np.flatnonzero(marks == _STARTS).tolist()
    is_over = np.append(marks != _GOES_ON, True)
    return [range(start, start + 1 + int(is_over[start + 1 :].argmax())) for start in starts]


def _given_back(stage: StageCost, spans: list[range], limit: float) -> list[range]:
    """The spans without layers that need not be recomputed, the slowest given back first."""
    slowest = sorted(
        (layer for span in spans for layer in span), key=lambda n: -stage.layers[n].forward_s
    )
    for layer in slowest:
        number = next(n for n, span in enumerate(spans) if layer in span)
        span = spans[number]
        parts = [part for part in (range(span.start, layer), range(layer + 1, span.stop)) if part]
        fewer = [*spans[:number], *parts, *spans[number + 1 :]]
        if stage.peak_bytes(fewer) <= limit:
            spans = fewer
    return spans
