"""Seconds and bytes of stages that recompute layers, by where they begin and end; whether they fit.

Recomputed layers add their forward pass on the slowest of the stage's devices to the stage's time,
and reduce what the stage keeps. Tables are made when they are first needed, for a stage's kinds of
devices.

Shape suffixes: I cut positions; in II, a stage begins at the first and ends at the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.activation_checkpointing.selection import (
    MORE_ROOM,
    PlacedStage,
    RecomputedLayers,
    SpanChoices,
    recompute_stages,
)
from sparsepipe.partition.activation_checkpointing.setting import StageSpans, recomputed_spans
from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost, moved
from sparsepipe.partition.costs.layers import Floats
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.memory import MIB, plan_bytes, room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.schedule import Plan


class LayerTables:
    """Tables of seconds and bytes of a problem's layers, by the kinds of devices of a stage."""

    def __init__(self, problem: Problem) -> None:
        assert problem.synchronous is not None
        assert len(problem.profiles) == len(problem.pool.kinds)
        self.problem, self.synchronous = problem, problem.synchronous
        self.chain = cache(self._chain)
        self.choices = cache(lambda kinds: SpanChoices(self.chain(kinds)))
        self.named = cache(self._named)
        self.sums = cache(self._sums)

    def _chain(self, kinds: tuple[int, ...]) -> StageCost:
        """Costs of all layers for a batch: for each, the highest on these ``kinds`` of devices."""
        profiles, last = self.problem.profiles, self.problem.spans.num_layers - 1
        return StageCost.worst(
            [StageCost.of(profiles[k], first=0, last=last, in_flight=1) for k in kinds]
        )

    def _sums(self, kinds: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """Bytes [I] for a batch: the two of ``Spans.stored_between``, and parameters so far."""
        layers = self.chain(kinds).layers
        saved_I = np.cumsum([0.0, *(layer.saved_bytes for layer in layers)])
        begin_I = np.array([*(layer.begin_bytes for layer in layers), 0.0])
        end_I = np.array([0.0, *(layer.end_bytes for layer in layers)])
        each = [[x.parameter_bytes for x in self.problem.profiles[k].layers] for k in kinds]
        weights_I = np.cumsum([0.0, *np.max(each, axis=0)])
        return saved_I - begin_I, saved_I + end_I, weights_I

    def _named(self, kinds: tuple[int, ...], whole: bool) -> tuple[Floats, Floats, Floats]:
        """Three arrays [I, I] by begin and end of a stage, for the profiles' batch: bytes that it
        keeps, most bytes inside a span, and seconds of recomputing the layers that the setting
        names, or all if ``whole``. Seconds of a ``whole`` stage with a named layer are infinite.
        """
        chain, places = self.chain(kinds), self.problem.spans.num_layers + 1
        spans = self.synchronous.spans(places - 1)
        named, starts = {layer for span in spans for layer in span}, {span.start for span in spans}
        kept_II, inside_II, seconds_II = (np.zeros((places, places)) for _ in range(3))
        for first in range(places - 1):
            kept = inside = most_inside = time_s = 0.0
            before = True  # whether the layer before is recomputed or in another stage
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
    """A class of stages whose recomputation differs only by where they begin and end.

    Attributes:
        kinds: indices of the kinds of their devices.
        in_flight: peak of microbatches in flight on a device, in multiples of the largest one.
        share: size of the largest microbatch as a fraction of the profiles' batch.
        replicas: number of devices of each stage; 2 stands for any number above 1.
        whole: whether the setting recomputes each of these stages as one span.
    """

    kinds: tuple[int, ...]
    in_flight: float
    share: float
    replicas: int
    whole: bool


class RecomputationCosts:
    """Seconds that recomputed layers add to the stages of a problem's plans; at most ``most_s``."""

    def __init__(self, problem: Problem) -> None:
        self.tables = tables = LayerTables(problem)
        self._memory, self._pool = problem.memory, problem.pool
        self._what = tables.synchronous
        self.microbatches = self._what.microbatches
        self._in_flight = cache(self.microbatches.in_flight_of)
        self._seconds: dict[StageClass, Floats] = {}
        whole = tables.chain(tuple(range(len(self._pool.kinds))))
        self.most_s = sum(layer.forward_s for layer in whole.layers)

    def class_of(
        self, kinds: Sequence[int], replicas: int, at_once: int, stage: int, readers: int
    ) -> StageClass:
        """The class of a stage whose devices have up to ``at_once`` microbatches in flight.

        ``readers`` devices are in the first stage; ``stage``: any number with this ``is_whole``.
        """
        readers = 1 if self._memory is None else readers
        return StageClass(
            kinds=tuple(kinds),
            in_flight=self._in_flight(replicas, at_once, readers=readers),
            share=self.microbatches.share(readers),
            replicas=min(replicas, 2),
            whole=self._what.is_whole(stage),
        )

    def classes_of(self, plan: Sequence[Choice]) -> list[StageClass]:
        """The class of each stage of a plan."""
        readers, left, found = sum(plan[0].counts), sum(sum(s.counts) for s in plan), []
        for number, stage in enumerate(plan):
            kinds = [kind for kind, count in enumerate(stage.counts) if count]
            replicas = sum(stage.counts)
            at_once = int(self.microbatches.at_once(replicas, left))
            found.append(self.class_of(kinds, replicas, at_once, number, readers))
            left -= replicas
        return found

    def seconds_s(self, plan: Sequence[Choice]) -> list[float]:
        """Seconds of recomputation of each stage of a plan, divided by its number of replicas.

        Infinite for a stage that does not fit; for all, if one has more devices than microbatches
        (the strategy refuses it), or the plan lacks a stage that the setting names.
        """
        most = max(sum(stage.counts) for stage in plan)
        if len(plan) < self.tables.problem.distinct_stages or most > self.microbatches.count:
            return [float("inf")] * len(plan)
        return [
            float(self.seconds_II(own)[stage.first, stage.end]) / sum(stage.counts)
            for own, stage in zip(self.classes_of(plan), plan, strict=True)
        ]

    def seconds_II(self, own: StageClass) -> Floats:
        """Seconds [I, I] of recomputation for a batch; infinite where a stage does not fit."""
        if own not in self._seconds:
            room_II = self._room_II(own) / own.share
            if self._what.setting == "auto":
                choices = self.tables.choices(own.kinds)
                self._seconds[own] = choices.seconds_II(room_II, in_flight=own.in_flight)
            else:
                kept_II, inside_II, again_II = self.tables.named(own.kinds, own.whole)
                fits_II = own.in_flight * kept_II + inside_II <= room_II * room_bytes(1.0)
                self._seconds[own] = np.where(fits_II, again_II, np.inf)
        return self._seconds[own]

    def spans(self, plan: Sequence[Choice]) -> StageSpans | None:
        """Spans that each stage of a plan recomputes with ``auto``; None for other settings."""
        if self._what.setting != "auto":
            return None
        found = []
        for own, stage in zip(self.classes_of(plan), plan, strict=True):
            room = float(self._room_II(own)[stage.first, stage.end]) / own.share
            best = self.tables.choices(own.kinds).cheapest(
                stage.first, stage.end, room, in_flight=own.in_flight
            )
            assert best is not None, "the plan would not have been found"
            found.append(tuple(moved(best, stage.first)))
        return tuple(found)

    def limit_bytes(self, own: StageClass) -> float:
        """The least memory in bytes of a device of such stages; infinite if unknown."""
        limits = [self._pool.kinds[kind].memory_bytes for kind in own.kinds]
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def _room_II(self, own: StageClass) -> Floats:
        """Bytes [I, I] that a device of each stage can keep for backward passes."""
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
    """Returns seconds and bytes of recomputing ``spans``; None: those that the setting names or,
    with ``auto``, the cheapest with which stages fit.
    """
    assert problem.synchronous is not None
    runs = RecomputationCosts(problem)
    stages = [
        PlacedStage(
            first=stage.first,
            last=stage.end - 1,
            profiles=tuple(problem.profiles[kind] for kind in own.kinds),
            replicas=own.replicas,
            limit_bytes=runs.limit_bytes(own),
            in_flight=own.in_flight,
            share=own.share,
        )
        for own, stage in zip(runs.classes_of(plan), plan, strict=True)
    ]
    if spans is None and problem.synchronous.setting != "auto":
        made = Plan.of(
            config="-".join(str(sum(stage.counts)) for stage in plan),
            cuts=[stage.first for stage in plan[1:]],
            num_layers=plan[-1].end,
        )
        spans = recomputed_spans(problem.synchronous.setting, made)
    return recompute_stages(stages, problem.memory, spans)


_LOOKING = "a search that considers the memory of each device: hete_mp or exact"


def no_fit_error(problem: Problem) -> PlanError:
    """Makes the error for a problem without a solution, with all that a plan must satisfy."""
    if problem.synchronous is None:
        return PlanError(
            "no plan fits the memory of the devices",
            remedy="use devices with more memory, more devices, a smaller data.batch_size, or an "
            "optimizer with less state",
        )
    cut, named = problem.synchronous.microbatches, problem.distinct_stages
    needs = "no plan fits the memory of the devices and has no more devices in a stage than "
    needs += f"microbatches ({cut.count})"
    if cut.least_readers > 1:
        needs += f", at least {cut.least_readers} first-stage devices to read samples for them"
    if named:
        needs += f", and a stage {named - 1}, which recompute names"
    return PlanError(
        needs,
        remedy=f"use {MORE_ROOM}; parallel.strategy.recompute=auto, unless it is set; or fewer "
        "microbatches, if these rather than the memory set the limit",
    )


def check_memory(plan: Sequence[Choice], problem: Problem) -> StageSpans | None:
    """Raises an error if a plan does not fit the devices; returns the spans to recompute so that it
    fits if the setting is ``auto``, else None.
    """
    if problem.memory is None:
        return None
    each = plan_bytes(plan, problem.spans, problem.pool, problem.memory)
    if problem.synchronous is not None:
        try:
            chosen = recomputation_of(plan, problem)
        except ConfigError as error:
            error.remedy += f"; or {_LOOKING}"
            raise
        if problem.synchronous.setting == "auto":
            return chosen.spans
        kept = (a + b for a, b in zip(chosen.beside_bytes, chosen.peaks_bytes, strict=True))
        each = list(zip(kept, (room for _, room in each), strict=True))
    for number, (own, room) in enumerate(each):
        if room is not None and own > room_bytes(room):
            raise PlanError(
                f"stage {number} keeps {own / MIB:,.0f} MiB on each device, but one of them has "
                f"only {room / MIB:,.0f} MiB",
                remedy=f"use a smaller data.batch_size, or {_LOOKING}",
            )
    return None
