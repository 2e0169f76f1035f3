"""What stages take, and whether they fit, that run layers once more, for searches of a plan.

What a stage recomputes adds its forward to the stage's time, for each layer as long as it takes on
the slowest of the stage's devices, and takes part of what it keeps away.

Where layers are chosen by the memory (``auto``), a stage's best choice takes a while to find, and a
search looks at thousands of stages. So it goes by bounds (``recomputation_bounds.py``), and what
its plan's stages really take is counted then, until the bounds promise nothing better
(``recomputed_costs.py``).

Shape suffixes: I places a model can be cut at: the first is a stage's begin, the second its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache

import numpy as np

from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recomputation_bounds import Bounds
from sparsepipe.partition.recomputed_plan import HeldStage
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.stage_cost import StageCost


@dataclass(frozen=True, slots=True)
class Sort:
    """Stages that differ in where they begin and end only, for what they recompute.

    Attributes:
        kinds: of their devices.
        flying: microbatches in flight, smaller ones than the largest counted less.
        replicas: of each of them; 2 stands for any number above 1.
        whole: whether the setting has them as one span each.
    """

    kinds: tuple[int, ...]
    flying: float
    replicas: int
    whole: bool


class Chains:
    """All layers of a problem, on some kinds of devices at a time.

    Args:
        problem: of profiles, with what is recomputed.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.recomputing is not None
        assert len(problem.profiles) == len(problem.fleet.kinds)
        self.problem, self.recomputing = problem, problem.recomputing
        self.bounds = cache(self._bounds)
        self.chain = cache(self._chain)
        self.weights_II = cache(self._weights_II)
        self.named = cache(self._named)

    def of(self, problem: Problem) -> Chains:
        """Of a problem that differs in memory or in the parts of a batch, knowing what this knows.

        Args:
            problem: with the same layers on the same devices.
        """
        assert problem.recomputing is not None
        assert problem.recomputing.setting == self.recomputing.setting
        other = copy(self)
        other.problem, other.recomputing = problem, problem.recomputing
        return other

    @property
    def anywhere_I(self) -> Floats:
        """Seconds of second runs that do not depend on the stages, summed over the first layers.

        They are those on the first kind of device.
        """
        chain, num_layers = self.chain((0,)), self.problem.spans.num_layers
        named = {layer for span in self.recomputing.spans(num_layers) for layer in span}
        every = self.recomputing.setting == "all"
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
        return Bounds(self.chain(kinds))

    def _weights_II(self, kinds: tuple[int, ...]) -> Floats:
        """Bytes of parameters of each stage."""
        rows = []
        for kind in kinds:
            layers = self.problem.profiles[kind].layers
            sums_I = np.cumsum([0.0, *(layer.parameter_bytes for layer in layers)])
            rows.append(sums_I[None, :] - sums_I[:, None])
        most_II: Floats = np.max(rows, axis=0)
        return most_II

    def _named(self, kinds: tuple[int, ...], whole: bool) -> tuple[Floats, Floats, Floats]:
        """Of layers that the setting names: what stays and what is inside, and seconds.

        These are infinite where a stage that is named has a layer that is named as well.
        """
        chain, places = self.chain(kinds), self.problem.spans.num_layers + 1
        every = self.recomputing.spans(places - 1)
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


class SecondRuns:
    """Of plans whose first stage has a number of devices, which cut their batches into pieces.

    Args:
        chains: of the problem.
        memory: what devices keep beside activations; None: it does not count.
        readers: devices of the first stage; None: any number, where memory does not count.
        more_bytes: that each device is taken to hold beyond its limit.

    Attributes:
        readers: devices of the first stage; None: any number.
        most_s: that a stage takes longer for what it recomputes, at most.
    """

    def __init__(
        self,
        chains: Chains,
        memory: MemoryModel | None,
        *,
        readers: int | None,
        more_bytes: float = 0.0,
    ) -> None:
        assert memory is None or readers is not None
        self.readers = readers
        self._chains, self._memory, self._more_bytes = chains, memory, more_bytes
        self._what, kinds = chains.recomputing, chains.problem.fleet.kinds
        parts = self._what.parts
        self._share = parts.share_of(parts.pieces(readers or 1)) * self._what.batch_share
        self._seconds: dict[Sort, Floats] = {}
        self._counted: set[tuple[Sort, int, int]] = set()
        whole = chains.chain(tuple(range(len(kinds))))
        self.most_s = sum(layer.forward_s for layer in whole.layers)

    def has_work_for(self, replicas: int) -> bool:
        """Whether each device of a stage has a microbatch: the strategy refuses others."""
        return replicas <= self._what.parts.microbatches

    def sort(self, counts: Sequence[int], *, left: int, stage: int) -> Sort:
        """Which a stage is of.

        Args:
            counts: its devices of each kind.
            left: devices of it and of all after it.
            stage: its number, or any that says as much (``Recomputing.is_whole``).
        """
        replicas = sum(counts)
        return Sort(
            kinds=tuple(kind for kind, count in enumerate(counts) if count),
            flying=self._what.parts.flying(replicas, left, readers=self.readers or 1),
            replicas=min(replicas, 2),
            whole=self._what.is_whole(stage),
        )

    def seconds_II(self, sort: Sort) -> Floats:
        """That each stage takes longer for a batch, at least; infinite where it does not fit."""
        if sort not in self._seconds:
            room_II = self._room_II(sort) / self._share
            if self._what.is_automatic:
                bounds = self._chains.bounds(sort.kinds)
                self._seconds[sort] = bounds.seconds_II(room_II, flying=sort.flying)
            else:
                kept_II, inside_II, again_II = self._chains.named(sort.kinds, sort.whole)
                fits_II = sort.flying * kept_II + inside_II <= room_II * room_bytes(1.0)
                self._seconds[sort] = np.where(fits_II, again_II, np.inf)
        return self._seconds[sort]

    def count(self, sort: Sort, first: int, end: int) -> float:
        """The same of one stage, exactly, which is known from then on.

        Args:
            sort: of the stage.
            first: its first layer.
            end: the first one behind it.
        """
        least_II, key = self.seconds_II(sort), (sort, first, end)
        if self._what.is_automatic and key not in self._counted:
            self._counted.add(key)
            if least_II[first, end] < np.inf:
                least_II[first, end] = self._cheapest_s(sort, first, end)
        return float(least_II[first, end])

    def _cheapest_s(self, sort: Sort, first: int, end: int) -> float:
        problem = self._chains.problem
        stage = HeldStage(
            first=first,
            last=end - 1,
            profiles=tuple(problem.profiles[kind] for kind in sort.kinds),
            replicas=sort.replicas,
            limit_bytes=self._limit_bytes(sort),
            in_flight=sort.flying,
            share=self._share,
        )
        spans, layers = stage.cheapest(self._memory), self._chains.chain(sort.kinds).layers
        if spans is None:
            return float("inf")
        return sum(layers[layer].forward_s for span in spans for layer in span)

    def _limit_bytes(self, sort: Sort) -> float:
        limits = [self._chains.problem.fleet.kinds[kind].memory_bytes for kind in sort.kinds]
        least = min((limit for limit in limits if limit is not None), default=float("inf"))
        return least + self._more_bytes

    def _room_II(self, sort: Sort) -> Floats:
        """What a device of each stage has for what backwards need."""
        weights_II = self._chains.weights_II(sort.kinds)
        if self._memory is None:
            return np.full(weights_II.shape, np.inf)
        each = self._memory.per_parameter_byte(1, replicas=sort.replicas)
        limit = room_bytes(self._limit_bytes(sort))
        room_II: Floats = limit - self._memory.reserved_bytes - each * weights_II
        return room_II
