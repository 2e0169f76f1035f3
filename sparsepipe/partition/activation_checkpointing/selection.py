"""The layers of a plan's stages to recompute such that each stage fits its devices.

For synchronous schedules: weights have one version, and what is in flight are microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsepipe.cluster.places import device_name
from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.cheapest_spans import Recomputation, cheapest
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.activation_checkpointing.stage_memory import StageCost, moved
from sparsepipe.partition.memory.microbatches import Microbatches
from sparsepipe.partition.memory.model import MIB, MemoryModel, room_bytes
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage on its devices, for the choice of layers to recompute.

    Where these differ, a layer takes as long, and keeps as much, as on the one where that is most,
    and the smallest of them is to hold it: all recompute the same layers.

    Args:
        last: its last one, inclusive.
        replicas: r, how many devices it has; 2 may stand for any number above 1.
        limit_bytes: memory of the smallest of them; infinite where unknown.
        in_flight: microbatches that a device has begun and not ended, at most; smaller ones than
            the largest count less.
        share: size of the largest of these over that of the profiles' batch.
    """

    first: int
    last: int
    profiles: tuple[Profile, ...]
    replicas: int
    limit_bytes: float
    in_flight: float
    share: float

    def cost(self) -> StageCost:
        """The costs of its microbatches, each the worst of its devices."""
        return StageCost.worst(
            [
                StageCost.of(
                    profile,
                    first=self.first,
                    last=self.last,
                    in_flight=self.in_flight,
                    share=self.share,
                )
                for profile in self.profiles
            ]
        )

    def beside_bytes(self, memory: MemoryModel | None) -> float:
        """Bytes that a device keeps beside those for backwards; 0 where memory does not count."""
        if memory is None:
            return 0.0
        weights = max(
            sum(layer.parameter_bytes for layer in profile.layers[self.first : self.last + 1])
            for profile in self.profiles
        )
        return memory.beside_bytes(weights, replicas=self.replicas)

    def room_bytes(self, memory: MemoryModel | None) -> float:
        """Bytes that a device has for what backwards need."""
        if memory is None:
            return float("inf")
        return room_bytes(self.limit_bytes) - self.beside_bytes(memory)

    def cheapest(self, memory: MemoryModel | None) -> Recomputation | None:
        """The spans that take least time of those with which it fits; None where none does."""
        room = self.room_bytes(memory)
        return None if room < 0 else cheapest(self.cost(), limit_bytes=room)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLayers:
    """Layers to recompute, with the seconds and bytes that result.

    Attributes:
        times_s: that recomputing takes each stage's slowest device, for a batch of the profiles.
        peaks_bytes: that a device of each stage keeps for its backwards, at most.
        rooms_bytes: that it has for that.
        beside_bytes: that it keeps beside that.
    """

    spans: StageSpans
    times_s: tuple[float, ...]
    peaks_bytes: tuple[float, ...]
    rooms_bytes: tuple[float, ...]
    beside_bytes: tuple[float, ...]


def choose_spans(
    plan: Plan,
    profiles: Mapping[str, Profile],
    limits_bytes: Mapping[str, float],
    *,
    memory: MemoryModel,
    microbatches: Microbatches,
) -> RecomputedLayers:
    """The spans that take least time of those with which all stages fit, see :func:`cheapest_of`.

    Raises:
        ConfigError: a stage does not fit, whatever is recomputed of it.
    """
    stages = []
    for number, stage in enumerate(plan.stages):
        names = dict.fromkeys(map(device_name, stage.devices))
        stages.append(
            PlacedStage(
                first=stage.layers[0],
                last=stage.layers[1],
                profiles=tuple(profiles[name] for name in names),
                replicas=stage.replicas,
                limit_bytes=min(limits_bytes[device] for device in stage.devices),
                in_flight=microbatches.in_flight(plan, number),
                share=microbatches.share(plan.replicas(0)),
            )
        )
    return cheapest_of(stages, memory)


def cheapest_of(stages: Sequence[PlacedStage], memory: MemoryModel | None) -> RecomputedLayers:
    """The spans that take least time of those with which stages fit."""
    spans = []
    for number, stage in enumerate(stages):
        own = stage.cheapest(memory)
        if own is None:
            cost = stage.cost()
            whole = [range(len(cost.layers))]
            least = min(cost.peak_bytes(whole), cost.peak_bytes(()))
            raise ConfigError(
                f"recompute=auto: stage {number} does not fit its devices: beside weights they "
                f"have {max(0.0, stage.room_bytes(memory)) / MIB:,.1f} MiB for its activations, "
                f"of which it keeps {least / MIB:,.1f} MiB with all or none of its layers "
                "recomputed",
                remedy=f"use {MORE_ROOM}",
            )
        spans.append(tuple(moved(own.spans, stage.first)))
    return counted(stages, memory, tuple(spans))


def counted(
    stages: Sequence[PlacedStage], memory: MemoryModel | None, spans: StageSpans
) -> RecomputedLayers:
    """Seconds and bytes of recomputing given spans, whether all stages fit or not."""
    times_s, peaks = [], []
    for stage, every in zip(stages, spans, strict=True):
        cost, own = stage.cost(), moved(every, -stage.first)
        times_s.append(cost.time_s(own) / stage.share)
        peaks.append(cost.peak_bytes(own))
    return RecomputedLayers(
        spans=spans,
        times_s=tuple(times_s),
        peaks_bytes=tuple(peaks),
        rooms_bytes=tuple(stage.room_bytes(memory) for stage in stages),
        beside_bytes=tuple(stage.beside_bytes(memory) for stage in stages),
    )


MORE_ROOM = (
    "devices with more memory, more devices, more microbatches "
    "(parallel.strategy.microbatches), parallel=sync_1f1b, a smaller data.batch_size, or an "
    "optimizer with less state"
)
"""Remedies where a plan does not fit, whatever is recomputed."""
