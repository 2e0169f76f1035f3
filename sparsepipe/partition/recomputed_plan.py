"""The layers of a plan's stages to recompute such that each stage fits its devices.

For synchronous schedules: weights have one version, and what is in flight are microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparsepipe.cluster.places import device_name
from sparsepipe.errors import ConfigError
from sparsepipe.partition.memory import MIB, MemoryModel, room_bytes
from sparsepipe.partition.recomputation import cheapest_spans
from sparsepipe.partition.recomputed_layers import StageSpans
from sparsepipe.partition.stage_cost import StageCost
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How a synchronous schedule has a minibatch in parts.

    Args:
        schedule: ``gpipe`` or ``1f1b``.
        microbatches: T, into which what all devices of the first stage read is cut.
        batch_size: samples that each of these reads, and of which the profiles are; None where
            nobody knows: parts are taken for even then.
    """

    schedule: str
    microbatches: int
    batch_size: int | None

    def in_flight(self, plan: Plan, stage: int) -> int:
        """Microbatches that a device of a stage has begun and not ended, at most."""
        own = -(-self.microbatches // plan.replicas(stage))
        return own if self.schedule == "gpipe" else min(own, plan.warmup(stage) + 1)

    def share(self, plan: Plan) -> float:
        """Size of the largest microbatch over that of the batch that the profiles are of."""
        parts = max(1, self.microbatches // plan.replicas(0))
        if self.batch_size is None:
            return 1 / parts
        return -(-self.batch_size // parts) / self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is to be recomputed, and what comes of it.

    Attributes:
        spans: of each stage.
        times_s: that recomputing takes each stage's slowest device, for a batch of the profiles.
        peaks_bytes: that a device of each stage keeps for its backwards, at most.
        rooms_bytes: that it has for that.
    """

    spans: StageSpans
    times_s: tuple[float, ...]
    peaks_bytes: tuple[float, ...]
    rooms_bytes: tuple[float, ...]


def choose_spans(
    plan: Plan,
    profiles: Mapping[str, Profile],
    limits_bytes: Mapping[str, float],
    *,
    memory: MemoryModel,
    parts: Parts,
) -> Chosen:
    """The spans that take least time of those with which all stages fit.

    Where the devices of a stage differ, a layer takes as long, and keeps as much, as on the one
    where that is most, and the smallest of them is to hold it: all recompute the same layers.

    Args:
        plan: whose devices are named ``host/model/number``.
        profiles: by the devices' models, of the batches that the first stage reads.
        limits_bytes: memory of each device of the plan, by its name.
        memory: what it keeps beside activations; of weights there is one version.
        parts: of a minibatch.

    Raises:
        ConfigError: a stage does not fit, whatever is recomputed of it.
    """
    spans, times_s, peaks, rooms = [], [], [], []
    for number in range(plan.num_stages):
        stage = _cost(plan, number, profiles, parts)
        room = _room(plan, number, profiles, limits_bytes, memory)
        found = cheapest_spans(stage, limit_bytes=room) if room >= 0 else None
        if found is None:
            raise _no_room(number, stage, room)
        first = plan.stages[number].layers[0]
        spans.append(tuple(range(first + s.start, first + s.stop) for s in found))
        times_s.append(stage.time_s(found) / parts.share(plan))
        peaks.append(stage.peak_bytes(found))
        rooms.append(room)
    return Chosen(
        spans=tuple(spans),
        times_s=tuple(times_s),
        peaks_bytes=tuple(peaks),
        rooms_bytes=tuple(rooms),
    )


def _cost(plan: Plan, number: int, profiles: Mapping[str, Profile], parts: Parts) -> StageCost:
    """Of the microbatches of a stage, on devices of which each is as bad as the worst."""
    first, last = plan.stages[number].layers
    flying, share = parts.in_flight(plan, number), parts.share(plan)
    costs = [
        StageCost.of(profile, first=first, last=last, in_flight=flying, share=share)
        for profile in _profiles(plan, number, profiles)
    ]
    return StageCost.worst(costs)


def _room(
    plan: Plan,
    number: int,
    profiles: Mapping[str, Profile],
    limits_bytes: Mapping[str, float],
    memory: MemoryModel,
) -> float:
    """What a device of a stage has for what backwards need."""
    (first, last), devices = plan.stages[number].layers, plan.stages[number].devices
    weights = max(
        sum(layer.parameter_bytes for layer in profile.layers[first : last + 1])
        for profile in _profiles(plan, number, profiles)
    )
    each = memory.per_parameter_byte(1, replicas=len(devices))
    limit = min(limits_bytes[device] for device in devices)
    return room_bytes(limit) - memory.reserved_bytes - each * weights


def _profiles(plan: Plan, number: int, profiles: Mapping[str, Profile]) -> list[Profile]:
    names = dict.fromkeys(map(device_name, plan.stages[number].devices))
    return [profiles[name] for name in names]


def _no_room(number: int, stage: StageCost, room: float) -> ConfigError:
    whole = stage.peak_bytes([range(len(stage.layers))])
    least = min(whole, stage.peak_bytes(()))
    return ConfigError(
        f"recompute=auto: stage {number} does not fit its devices, whatever is recomputed: beside "
        f"weights there are {max(0.0, room) / MIB:,.1f} MiB for its activations, of which it "
        f"keeps {least / MIB:,.1f} MiB where all of its layers are recomputed, or none",
        remedy="use devices with more memory, more devices, more parts of a minibatch "
        "(parallel.strategy.microbatches), parallel=sync_1f1b, a smaller data.batch_size, or an "
        "optimizer with less state",
    )
