"""What stages take, and whether they fit, that run layers once more, for searches of a plan.

What a stage recomputes adds its forward to the stage's time, for each layer as long as it takes on
the slowest of the stage's devices, and takes part of what it keeps away.

Where layers are chosen by the memory (``auto``), a stage's best choice takes a while to find, and a
search looks at thousands of stages. So it goes by bounds (``bounds.py``), and has
those stages counted that matter (``counted_search.py``).

Shape suffixes: I places a model can be cut at: the first is a stage's begin, the second its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from sparsepipe.partition.layer_tables import LayerTables
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.partition.recompute.layers import StageSpans
from sparsepipe.partition.recompute.plan import HeldStage
from sparsepipe.partition.recompute.stage import NONE_FITS, Cheapest
from sparsepipe.partition.recompute.stage_cost import moved
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.ties import Choice


@dataclass(frozen=True, slots=True)
class StageClass:
    """Stages that differ in where they begin and end only, for what they recompute.

    Attributes:
        kinds: of their devices.
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


class SecondRuns:
    """What stages of a problem's plans take longer for what they recompute.

    Args:
        tables: of the problem.
        memory: what devices keep beside activations; None: it does not count.
        more_bytes: that each device is taken to hold beyond its limit.

    Attributes:
        tables: of the problem.
        microbatches: of a minibatch.
        work: what is left of the tables'.
        most_s: that a stage takes longer for what it recomputes, at most.
    """

    def __init__(
        self,
        tables: LayerTables,
        memory: MemoryModel | None,
        *,
        more_bytes: float = 0.0,
    ) -> None:
        self.tables, self._memory, self._more_bytes = tables, memory, more_bytes
        self._what, self._fleet = tables.synchronous, tables.problem.fleet
        self.microbatches = self._what.microbatches
        self._in_flight = cache(self.microbatches.in_flight_of)
        self._seconds: dict[StageClass, Floats] = {}
        self._found: dict[tuple[StageClass, int, int], Cheapest] = {}
        self.work = tables.work
        whole = tables.chain(tuple(range(len(self._fleet.kinds))))
        self.most_s = sum(layer.forward_s for layer in whole.layers)

    def has_work_for(self, replicas: int) -> bool:
        """Whether each device of a stage has a microbatch: the strategy refuses others."""
        return replicas <= self.microbatches.count

    def class_of(self, counts: Sequence[int], *, left: int, stage: int, readers: int) -> StageClass:
        """Which a stage is of.

        Args:
            counts: its devices of each kind.
            left: devices of it and of all after it.
            stage: its number, or any that says as much (``SynchronousStages.is_whole``).
            readers: devices of the first stage; where memory does not count they change nothing.
        """
        kinds, replicas = [kind for kind, count in enumerate(counts) if count], sum(counts)
        at_once = int(self.microbatches.at_once(replicas, left))
        return self.class_with(
            kinds, replicas=replicas, at_once=at_once, stage=stage, readers=readers
        )

    def class_with(
        self, kinds: Sequence[int], *, replicas: int, at_once: int, stage: int, readers: int
    ) -> StageClass:
        """The same of a stage with so many devices of some kinds.

        Args:
            kinds: in order.
            replicas: r, its devices.
            at_once: microbatches that one of them has (``Microbatches.at_once``).
            stage: see :meth:`class_of`.
            readers: see :meth:`class_of`.
        """
        what = self._what
        readers = 1 if self._memory is None else readers
        return StageClass(
            kinds=tuple(kinds),
            in_flight=self._in_flight(replicas, at_once, readers=readers),
            share=self.microbatches.share(readers) * what.batch_share,
            replicas=min(replicas, 2),
            whole=what.is_whole(stage),
        )

    def classes_of(self, plan: Sequence[Choice]) -> list[StageClass]:
        """Which each stage of a plan is of."""
        readers, left, found = sum(plan[0].counts), sum(sum(s.counts) for s in plan), []
        for number, stage in enumerate(plan):
            found.append(self.class_of(stage.counts, left=left, stage=number, readers=readers))
            left -= sum(stage.counts)
        return found

    def seconds_II(self, own: StageClass) -> Floats:
        """That each stage takes longer for a batch, at least; infinite where it does not fit.

        Args:
            own: which class they are of.
        """
        if own not in self._seconds:
            room_II = self._room_II(own) / own.share
            if self._what.is_automatic:
                bounds = self.tables.bounds(own.kinds)
                self._seconds[own] = bounds.seconds_II(room_II, in_flight=own.in_flight)
            else:
                kept_II, inside_II, again_II = self.tables.named(own.kinds, own.whole)
                fits_II = own.in_flight * kept_II + inside_II <= room_II * room_bytes(1.0)
                self._seconds[own] = np.where(fits_II, again_II, np.inf)
        return self._seconds[own]

    def count(self, own: StageClass, first: int, end: int) -> float:
        """The same of one stage, exactly, which is known from then on.

        Where the work is done before that, it is what is known then; infinite where that is none.

        Args:
            own: which class the stage is of.
            first: its first layer.
            end: the first one behind it.
        """
        if self.seconds_II(own)[first, end] < self.at_most(own, first, end):
            self._look(own, first, end, None)
        return self.at_most(own, first, end)

    def keeps_to(self, own: StageClass, first: int, end: int, *, most_s: float) -> bool:
        """Whether a stage takes no more than a time longer; what comes of that is known then.

        Args:
            own: see :meth:`count`.
            first: see :meth:`count`.
            end: see :meth:`count`.
            most_s: the time, for a batch.
        """
        if self.seconds_II(own)[first, end] > most_s:
            return False
        if self.at_most(own, first, end) <= most_s:
            return True
        return self._look(own, first, end, most_s * own.share)

    def at_most(self, own: StageClass, first: int, end: int) -> float:
        """What a stage takes longer, as far as is known; infinite where it is not.

        Args:
            own: see :meth:`count`.
            first: see :meth:`count`.
            end: see :meth:`count`.
        """
        if not self._what.is_automatic:
            return float(self.seconds_II(own)[first, end])
        return self._found.get((own, first, end), NONE_FITS).time_s / own.share

    def spans(self, plan: Sequence[Choice]) -> StageSpans | None:
        """The cheapest layers of each stage, or those that are known where work does not suffice.

        None where the memory does not choose them.

        Args:
            plan: for each of whose stages some are known.
        """
        if not self._what.is_automatic:
            return None
        found = []
        for number, (own, stage) in enumerate(zip(self.classes_of(plan), plan, strict=True)):
            self.work.allow(turns=len(plan) - number)
            self._look(own, stage.first, stage.end, None)
            spans = self._found[own, stage.first, stage.end].spans
            assert spans is not None, "the plan would not have been found"
            found.append(tuple(moved(spans, stage.first)))
        return tuple(found)

    def _look(self, own: StageClass, first: int, end: int, enough_s: float | None) -> bool:
        """Looks for layers, see :meth:`HeldStage.cheapest`; whether it finds some."""
        stage = self.held(own, first, end)
        found = stage.cheapest(self._memory, enough_s=enough_s, work=self.work)
        least_II = self.seconds_II(own)
        least_II[first, end] = max(least_II[first, end], found.least_s / own.share)
        if found.time_s <= self._found.get((own, first, end), NONE_FITS).time_s:
            self._found[own, first, end] = found
        return found.spans is not None

    def held(self, own: StageClass, first: int, end: int) -> HeldStage:
        """A stage as the memory of its devices has it.

        Args:
            own: see :meth:`count`.
            first: see :meth:`count`.
            end: see :meth:`count`.
        """
        profiles = self.tables.problem.profiles
        return HeldStage(
            first=first,
            last=end - 1,
            profiles=tuple(profiles[kind] for kind in own.kinds),
            replicas=own.replicas,
            limit_bytes=self.limit_bytes(own),
            in_flight=own.in_flight,
            share=own.share,
        )

    def limit_bytes(self, own: StageClass) -> float:
        """What the smallest device of such stages holds; infinite where nobody knows."""
        limits = [self._fleet.kinds[kind].memory_bytes for kind in own.kinds]
        least = min((limit for limit in limits if limit is not None), default=float("inf"))
        return least + self._more_bytes

    def _room_II(self, own: StageClass) -> Floats:
        """What a device of each stage has for what backwards need."""
        weights_II = self.tables.weights_II(own.kinds)
        if self._memory is None:
            return np.full(weights_II.shape, np.inf)
        beside_II = self._memory.beside_bytes(weights_II, replicas=own.replicas)
        room_II: Floats = room_bytes(self.limit_bytes(own)) - beside_II
        return room_II
