"""The layers of a plan's stages to recompute such that each stage fits its devices.

For synchronous schedules: weights have one version, and what is in flight are microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsepipe.cluster.places import device_name
from sparsepipe.errors import ConfigError
from sparsepipe.partition.memory import MIB, MemoryModel, room_bytes
from sparsepipe.partition.recomputation import cheapest_spans
from sparsepipe.partition.recomputed_layers import OwnSpans, StageSpans
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

    def in_flight(self, plan: Plan, stage: int) -> float:
        """Microbatches that a device of a stage has begun and not ended, at most.

        Smaller ones than the largest count less.
        """
        left = plan.num_ranks - plan.ranks_of(stage).start
        return self.flying(plan.replicas(stage), left, readers=plan.replicas(0))

    def flying(self, replicas: int, left: int, *, readers: int) -> float:
        """The same of a stage of some devices.

        Args:
            replicas: r, devices of the stage.
            left: R, devices of this stage and of those after it.
            readers: devices of the first stage.
        """
        most = -(-self.microbatches // replicas)
        if self.schedule != "gpipe":
            most = min(most, (left - 1) // replicas + 1)
        if self.microbatches % readers == 0:
            return most  # which all are as large
        sizes = self.sizes(readers)
        each = [sizes[device::replicas] for device in range(replicas)]
        held = (sum(own[n : n + most]) for own in each for n in range(max(1, len(own) - most + 1)))
        return max(held) / max(sizes)

    def sizes(self, readers: int) -> list[float]:
        """Of the microbatches, each over that of the batch that the profiles are of.

        Devices of the first stage take turns at them, and each cuts its batch into its own.

        Args:
            readers: devices of the first stage.
        """
        total = self.microbatches
        own = [len(range(number % readers, total, readers)) for number in range(total)]
        return [self.share_of(pieces) for pieces in own]

    def pieces(self, readers: int) -> int:
        """Microbatches that each device of the first stage cuts its batch into, at least.

        Args:
            readers: devices of the first stage.
        """
        return max(1, self.microbatches // readers)

    def share(self, plan: Plan) -> float:
        """Size of the largest microbatch over that of the batch that the profiles are of."""
        return self.share_of(self.pieces(plan.replicas(0)))

    def share_of(self, pieces: int) -> float:
        """The same, of a batch that is cut into some pieces."""
        if self.batch_size is None:
            return 1 / pieces
        return -(-self.batch_size // pieces) / self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """A stage, as the memory of its devices has it.

    Where these differ, a layer takes as long, and keeps as much, as on the one where that is most,
    and the smallest of them is to hold it: all recompute the same layers.

    Args:
        first: its first layer.
        last: its last one, inclusive.
        profiles: of its devices, each once.
        replicas: r, how many devices it has.
        limit_bytes: memory of the smallest of them; infinite where nobody knows.
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
        """Of its microbatches, on devices of which each is as bad as the worst."""
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
        """What a device keeps beside what backwards need; nothing where memory does not count."""
        if memory is None:
            return 0.0
        weights = max(
            sum(layer.parameter_bytes for layer in profile.layers[self.first : self.last + 1])
            for profile in self.profiles
        )
        each = memory.per_parameter_byte(1, replicas=self.replicas)
        return memory.reserved_bytes + each * weights

    def room_bytes(self, memory: MemoryModel | None) -> float:
        """What a device has for what backwards need."""
        if memory is None:
            return float("inf")
        return room_bytes(self.limit_bytes) - self.beside_bytes(memory)

    def cheapest(self, memory: MemoryModel | None) -> OwnSpans | None:
        """The spans that take least time of those with which it fits; None where none do."""
        room = self.room_bytes(memory)
        found = cheapest_spans(self.cost(), limit_bytes=room) if room >= 0 else None
        return None if found is None else tuple(_moved(found, self.first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is to be recomputed, and what comes of it.

    Attributes:
        spans: of each stage.
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
    parts: Parts,
) -> Chosen:
    """The spans that take least time of those with which all stages fit.

    Args:
        plan: whose devices are named ``host/model/number``.
        profiles: by the devices' models, of the batches that the first stage reads.
        limits_bytes: memory of each device of the plan, by its name.
        memory: what it keeps beside activations; of weights there is one version.
        parts: of a minibatch.

    Raises:
        ConfigError: a stage does not fit, whatever is recomputed of it.
    """
    stages = []
    for number, stage in enumerate(plan.stages):
        names = dict.fromkeys(map(device_name, stage.devices))
        stages.append(
            HeldStage(
                first=stage.layers[0],
                last=stage.layers[1],
                profiles=tuple(profiles[name] for name in names),
                replicas=stage.replicas,
                limit_bytes=min(limits_bytes[device] for device in stage.devices),
                in_flight=parts.in_flight(plan, number),
                share=parts.share(plan),
            )
        )
    return cheapest_of(stages, memory)


def cheapest_of(stages: Sequence[HeldStage], memory: MemoryModel | None) -> Chosen:
    """The same, of stages.

    Args:
        stages: of a plan, in order.
        memory: what devices keep beside activations; None: it does not count.

    Raises:
        ConfigError: a stage does not fit, whatever is recomputed of it.
    """
    spans = []
    for number, stage in enumerate(stages):
        found = stage.cheapest(memory)
        if found is None:
            raise _no_room(number, stage.cost(), stage.room_bytes(memory))
        spans.append(found)
    return counted(stages, memory, tuple(spans))


def counted(stages: Sequence[HeldStage], memory: MemoryModel | None, spans: StageSpans) -> Chosen:
    """What comes of recomputing some spans, whether all stages fit or not.

    Args:
        stages: of a plan, in order.
        memory: what devices keep beside activations; None: it does not count.
        spans: of each of the stages.
    """
    times_s, peaks = [], []
    for stage, every in zip(stages, spans, strict=True):
        cost, own = stage.cost(), _moved(every, -stage.first)
        times_s.append(cost.time_s(own) / stage.share)
        peaks.append(cost.peak_bytes(own))
    return Chosen(
        spans=spans,
        times_s=tuple(times_s),
        peaks_bytes=tuple(peaks),
        rooms_bytes=tuple(stage.room_bytes(memory) for stage in stages),
        beside_bytes=tuple(stage.beside_bytes(memory) for stage in stages),
    )


def _moved(spans: Sequence[range], by: int) -> list[range]:
    """With layers that are numbered from another one on."""
    return [range(by + span.start, by + span.stop) for span in spans]


def _no_room(number: int, stage: StageCost, room: float) -> ConfigError:
    whole = stage.peak_bytes([range(len(stage.layers))])
    least = min(whole, stage.peak_bytes(()))
    return ConfigError(
        f"recompute=auto: stage {number} does not fit its devices, whatever is recomputed: beside "
        f"weights there are {max(0.0, room) / MIB:,.1f} MiB for its activations, of which it "
        f"keeps {least / MIB:,.1f} MiB where all of its layers are recomputed, or none",
        remedy=f"use {MORE_ROOM}",
    )


MORE_ROOM = (
    "devices with more memory, more devices, more parts of a minibatch "
    "(parallel.strategy.microbatches), parallel=sync_1f1b, a smaller data.batch_size, or an "
    "optimizer with less state"
)
"""What lets a plan fit that does not, whatever is recomputed."""
