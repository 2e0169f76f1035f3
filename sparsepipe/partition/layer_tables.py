"""Layers of a problem as tables by where a stage begins and ends, for searches of a plan.

Each is made when it is first asked for, for the kinds of devices that a stage has: its layers are
as slow, and keep as much, as on the worst of these.

Shape suffixes: I places a model can be cut at: the first is a stage's begin, the second its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache

import numpy as np

from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recompute.bounds import Bounds
from sparsepipe.partition.recompute.stage_cost import StageCost
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.work import Work


class LayerTables:
    """What all layers of a problem cost and keep, on some kinds of devices at a time.

    Args:
        problem: of profiles, with what is recomputed.
        work: that looking at layers is taken from; None: there is no end of it.

    Attributes:
        work: what is left of it.
    """

    def __init__(self, problem: Problem, work: Work | None = None) -> None:
        assert problem.synchronous is not None
        assert len(problem.profiles) == len(problem.fleet.kinds)
        self.problem, self.synchronous = problem, problem.synchronous
        self.work = Work() if work is None else work
        self.bounds = cache(self._bounds)
        self.chain = cache(self._chain)
        self.weights_II = cache(self._weights_II)
        self.named = cache(self._named)
        self.sums = cache(self._sums)

    def of(self, problem: Problem) -> LayerTables:
        """Of a problem that differs in memory or in its microbatches, knowing what this knows.

        Args:
            problem: with the same layers on the same devices.
        """
        assert problem.synchronous is not None
        assert problem.synchronous.setting == self.synchronous.setting
        other = copy(self)
        other.problem, other.synchronous = problem, problem.synchronous
        return other

    @property
    def anywhere_I(self) -> Floats:
        """Seconds of second runs that do not depend on the stages, summed over the first layers.

        They are those on the first kind of device.
        """
        chain, num_layers = self.chain((0,)), self.problem.spans.num_layers
        named = {layer for span in self.synchronous.spans(num_layers) for layer in span}
        every = self.synchronous.setting == "all"
        seconds = [own.forward_s * (every or n in named) for n, own in enumerate(chain.layers)]
        sums_I: Floats = np.cumsum([0.0, *seconds])
        return sums_I

    def _chain(self, kinds: tuple[int, ...]) -> StageCost:
        """Of a batch, on devices of which each is as bad as the worst."""
        profiles, last = self.problem.profiles, self.problem.spans.num_layers - 1
        return StageCost.worst(
            [StageCost.of(profiles[k], first=0, last=last, in_flight=1) for k in kinds]
        )

    def _bounds(self, kinds: tuple[int, ...]) -> Bounds:
        return Bounds(self.chain(kinds), self.work)

    def _weights_II(self, kinds: tuple[int, ...]) -> Floats:
        """Bytes of parameters of each stage."""
        rows = []
        for kind in kinds:
            layers = self.problem.profiles[kind].layers
            sums_I = np.cumsum([0.0, *(layer.parameter_bytes for layer in layers)])
            rows.append(sums_I[None, :] - sums_I[:, None])
        most_II: Floats = np.max(rows, axis=0)
        return most_II

    def _sums(self, kinds: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """Of a batch, by places: bytes of what backwards need, and of parameters.

        A stage that recomputes nothing keeps for its backward the second of its end less the first
        of its begin (``Spans.stored_between``). The third is of parameters, a stage's being those
        of its end less those of its begin.
        """
        layers = self.chain(kinds).layers
        saved_I = np.cumsum([0.0, *(layer.saved_bytes for layer in layers)])
        begin_I = np.array([*(layer.begin_bytes for layer in layers), 0.0])
        end_I = np.array([0.0, *(layer.end_bytes for layer in layers)])
        each = [[x.parameter_bytes for x in self.problem.profiles[k].layers] for k in kinds]
        weights_I = np.cumsum([0.0, *np.max(each, axis=0)])
        return saved_I - begin_I, saved_I + end_I, weights_I

    def _named(self, kinds: tuple[int, ...], whole: bool) -> tuple[Floats, Floats, Floats]:
        """Of layers that the setting names: what stays and what is inside, and seconds.

        These are infinite where a stage that is named has a layer that is named as well.
        """
        chain, places = self.chain(kinds), self.problem.spans.num_layers + 1
        every = self.synchronous.spans(places - 1)
        kept_II, inside_II, seconds_II = (np.zeros((places, places)) for _ in range(3))
        for first in range(places - 1):
            rows = _grown(chain, every, first, whole=whole)
            kept_II[first, first + 1 :], inside_II[first, first + 1 :] = rows[0], rows[1]
            seconds_II[first, first + 1 :] = rows[2]
        return kept_II, inside_II, seconds_II


def _grown(
    chain: StageCost, spans: Sequence[range], first: int, *, whole: bool
) -> tuple[list[float], list[float], list[float]]:
    """Bytes that stay, most bytes inside of a span, and seconds, of stages that begin at a layer.

    Each stage has a layer more than the one before it (``StageCost.kept_bytes`` and the others).

    Args:
        chain: all layers.
        spans: that are named, as far as stages have them.
        first: the layer.
        whole: whether each stage is one span itself.
    """
    named, starts = {layer for span in spans for layer in span}, {span.start for span in spans}
    kept, inside, seconds = [], [], []
    total = own_inside = most_inside = time_s = 0.0
    before = True  # whether the layer before is recomputed; the first one's is not here
    for number, layer in enumerate(chain.layers[first:], first):
        again = whole or number in named
        if again and (number == first or (number in starts and not whole)):
            total += chain.border_bytes(number, before)
            own_inside = max(0.0, layer.begin_bytes - chain.border_bytes(number, True))
        if again:
            own_inside += layer.saved_bytes
            most_inside = max(most_inside, own_inside)
            time_s += np.inf if whole and number in named else layer.forward_s
        else:
            total += layer.saved_bytes + before * layer.begin_bytes
        before = again
        kept.append(total + (layer.output_bytes if again else layer.end_bytes))
        inside.append(most_inside)
        seconds.append(time_s)
    return kept, inside, seconds
