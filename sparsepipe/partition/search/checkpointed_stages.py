"""Seconds and bytes of stages that recompute layers, by where they begin and end.

Recomputed layers add their forward to the stage's time, each as long as it takes on the slowest of
the stage's devices, and reduce what the stage keeps. Tables are made when they
are first needed, for the kinds of devices that a stage has.

Shape suffixes: I places a model can be cut at: the first is a stage's begin, the second its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from sparsepipe.partition.activation_checkpointing.cheapest_spans import SpanChoices
from sparsepipe.partition.activation_checkpointing.selection import (
    PlacedStage,
    RecomputedLayers,
    cheapest_of,
    counted,
)
from sparsepipe.partition.activation_checkpointing.setting import StageSpans, recomputed_spans
from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost, moved
from sparsepipe.partition.costs.layers import Floats
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.memory.model import MemoryModel, room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.schedule import Plan


class LayerTables:
    """Costs and bytes of a problem's layers, by the kinds of devices of a stage."""

    def __init__(self, problem: Problem) -> None:
        assert problem.synchronous is not None
        assert len(problem.profiles) == len(problem.pool.kinds)
        self.problem, self.synchronous = problem, problem.synchronous
        self.chain = cache(self._chain)
        self.choices = cache(lambda kinds: SpanChoices(self.chain(kinds)))
        self.named = cache(self._named)
        self.sums = cache(self._sums)

    @property
    def anywhere_I(self) -> Floats:
        """Seconds of recomputation that do not depend on the stages, summed over the first layers.

        They are those on the first kind of device.
        """
        chain, num_layers = self.chain((0,)), self.problem.spans.num_layers
        named = {layer for span in self.synchronous.spans(num_layers) for layer in span}
        every = self.synchronous.setting == "all"
        seconds = [own.forward_s * (every or n in named) for n, own in enumerate(chain.layers)]
        sums_I: Floats = np.cumsum([0.0, *seconds])
        return sums_I

    def _chain(self, kinds: tuple[int, ...]) -> StageCost:
        """The layers' costs for a batch, each the worst of these kinds of devices."""
        profiles, last = self.problem.profiles, self.problem.spans.num_layers - 1
        return StageCost.worst(
            [StageCost.of(profiles[k], first=0, last=last, in_flight=1) for k in kinds]
        )

    def _sums(self, kinds: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """Bytes by places for a batch: those that backwards need, and those of parameters.

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
        """Bytes that stages keep, most bytes inside a span, and seconds, of the layers that the
        setting names; seconds are infinite where a named stage has a layer that is named as well.

        Stages from each first layer are made longer layer by layer.
        """
        chain, places = self.chain(kinds), self.problem.spans.num_layers + 1
        spans = self.synchronous.spans(places - 1)
        named, starts = {layer for span in spans for layer in span}, {span.start for span in spans}
        kept_II, inside_II, seconds_II = (np.zeros((places, places)) for _ in range(3))
        for first in range(places - 1):
            kept = inside = most_inside = time_s = 0.0
            before = True  # whether the layer before is recomputed; the first one's is not here
            for number, layer in enumerate(chain.layers[first:], first):
                again = whole or number in named
                if again and (number == first or (number in starts and not whole)):
                    kept += chain.border_bytes(number, before)
                    inside = max(0.0, layer.begin_bytes - chain.border_bytes(number, True))
                if again:
                    inside += layer.saved_bytes
                    most_inside = max(most_inside, inside)
                    time_s += np.inf if whole and number in named else layer.forward_s
                else:
                    kept += layer.saved_bytes + before * layer.begin_bytes
                before = again
                place = first, number + 1
                kept_II[place] = kept + (layer.output_bytes if again else layer.end_bytes)
                inside_II[place], seconds_II[place] = most_inside, time_s
        return kept_II, inside_II, seconds_II


@dataclass(frozen=True, slots=True)
class StageClass:
    """Stages that differ in where they begin and end only, for what they recompute.

    Attributes:
        in_flight: microbatches, smaller ones than the largest counted less.
        share: size of the largest of these over that of the profiles' batch.
        replicas: of each of them; 2 stands for any number above 1.
        whole: whether the setting has them as one span each.
    """

    kinds: tuple[int, ...]
    in_flight: float
    share: float
    replicas: int
    whole: bool


class RecomputationCosts:
    """Seconds that recomputed layers add to the stages of a problem's plans.

    Args:
        memory: what devices keep beside activations; None: it does not count.

    Attributes:
        most_s: that a stage takes longer for what it recomputes, at most.
    """

    def __init__(self, tables: LayerTables, memory: MemoryModel | None) -> None:
        self.tables, self._memory = tables, memory
        self._what, self._pool = tables.synchronous, tables.problem.pool
        self.microbatches = self._what.microbatches
        self._in_flight = cache(self.microbatches.in_flight_of)
        self._seconds: dict[StageClass, Floats] = {}
        whole = tables.chain(tuple(range(len(self._pool.kinds))))
        self.most_s = sum(layer.forward_s for layer in whole.layers)

    def has_work_for(self, replicas: int) -> bool:
        """Whether each device of a stage has a microbatch: the strategy refuses others."""
        return replicas <= self.microbatches.count

    def class_of(self, counts: Sequence[int], *, left: int, stage: int, readers: int) -> StageClass:
        """The class of a stage with such counts of devices, of which ``left`` are its own and those
        of all after it.

        ``stage`` is its number, or any for which ``SynchronousStages.is_whole`` is the same.
        """
        kinds, replicas = [kind for kind, count in enumerate(counts) if count], sum(counts)
        at_once = int(self.microbatches.at_once(replicas, left))
        return self.class_with(
            kinds, replicas=replicas, at_once=at_once, stage=stage, readers=readers
        )

    def class_with(
        self, kinds: Sequence[int], *, replicas: int, at_once: int, stage: int, readers: int
    ) -> StageClass:
        """The same of a stage with so many devices of some kinds, in order, each with ``at_once``
        microbatches.
        """
        what = self._what
        readers = 1 if self._memory is None else readers
        return StageClass(
            kinds=tuple(kinds),
            in_flight=self._in_flight(replicas, at_once, readers=readers),
            share=self.microbatches.share(readers),
            replicas=min(replicas, 2),
            whole=what.is_whole(stage),
        )

    def classes_of(self, plan: Sequence[Choice]) -> list[StageClass]:
        """The class of each stage of a plan."""
        readers, left, found = sum(plan[0].counts), sum(sum(s.counts) for s in plan), []
        for number, stage in enumerate(plan):
            found.append(self.class_of(stage.counts, left=left, stage=number, readers=readers))
            left -= sum(stage.counts)
        return found

    def seconds_II(self, own: StageClass) -> Floats:
        """Extra seconds of each stage for a batch; infinite where it does not fit."""
        if own not in self._seconds:
            room_II = self._room_II(own) / own.share
            if self._what.is_automatic:
                choices = self.tables.choices(own.kinds)
                self._seconds[own] = choices.seconds_II(room_II, in_flight=own.in_flight)
            else:
                kept_II, inside_II, again_II = self.tables.named(own.kinds, own.whole)
                fits_II = own.in_flight * kept_II + inside_II <= room_II * room_bytes(1.0)
                self._seconds[own] = np.where(fits_II, again_II, np.inf)
        return self._seconds[own]

    def spans(self, plan: Sequence[Choice]) -> StageSpans | None:
        """The cheapest layers of each stage; None where the memory does not choose them."""
        if not self._what.is_automatic:
            return None
        found = []
        for own, stage in zip(self.classes_of(plan), plan, strict=True):
            room = float(self._room_II(own)[stage.first, stage.end]) / own.share
            best = self.tables.choices(own.kinds).cheapest(
                stage.first, stage.end, room, in_flight=own.in_flight
            )
            assert best is not None, "the plan would not have been found"
            found.append(tuple(moved(best.spans, stage.first)))
        return tuple(found)

    def held(self, own: StageClass, first: int, end: int) -> PlacedStage:
        """A stage as the memory of its devices has it."""
        profiles = self.tables.problem.profiles
        return PlacedStage(
            first=first,
            last=end - 1,
            profiles=tuple(profiles[kind] for kind in own.kinds),
            replicas=own.replicas,
            limit_bytes=self.limit_bytes(own),
            in_flight=own.in_flight,
            share=own.share,
        )

    def limit_bytes(self, own: StageClass) -> float:
        """Memory of the smallest device of such stages; infinite where unknown."""
        limits = [self._pool.kinds[kind].memory_bytes for kind in own.kinds]
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def _room_II(self, own: StageClass) -> Floats:
        """Bytes that a device of each stage has for what backwards need."""
        weights_I = self.tables.sums(own.kinds)[2]
        weights_II = weights_I[None, :] - weights_I[:, None]
        if self._memory is None:
            return np.full(weights_II.shape, np.inf)
        beside_II = self._memory.beside_bytes(weights_II, replicas=own.replicas)
        room_II: Floats = room_bytes(self.limit_bytes(own)) - beside_II
        return room_II


def recomputation_of(
    plan: Sequence[Choice], problem: Problem, spans: StageSpans | None = None
) -> RecomputedLayers:
    """The layers that the setting names, or the cheapest ones that fit; and what comes of it.

    A search may have chosen ``spans`` for these stages already.

    Raises:
        ConfigError: the plan has no such layers or stages; or layers are to be chosen, and a stage
            does not fit, whatever is recomputed.
    """
    assert problem.synchronous is not None
    runs = RecomputationCosts(LayerTables(problem), problem.memory)
    each = zip(runs.classes_of(plan), plan, strict=True)
    stages = [runs.held(own, stage.first, stage.end) for own, stage in each]
    if spans is None:
        if problem.synchronous.is_automatic:
            return cheapest_of(stages, problem.memory)
        made = Plan.of(
            config="-".join(str(sum(stage.counts)) for stage in plan),
            cuts=[stage.first for stage in plan[1:]],
            num_layers=plan[-1].end,
        )
        spans = recomputed_spans(problem.synchronous.setting, made)
    return counted(stages, problem.memory, spans)
