"""Bytes that a stage keeps in the memory of each of its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from sparsepipe.errors import ConfigError
from sparsepipe.partition.costs.layers import Floats, Spans
from sparsepipe.partition.devices import Choice, DevicePool

_ROUNDING = 1e-9

_Bytes = TypeVar("_Bytes", float, Floats)

MIB = 2**20
"""Bytes; messages give memory in these."""

REPLICA_BUFFERS = 2.0
"""Bytes for each byte of parameters that a replica keeps for averaging gradients, at most: the sum
that it hands on and the parts that it receives, which in a chain (``schedule.communication``)
are a few chunks. On CUDA over gloo the second, and a copy of the first, lie in host memory; this
counts as much on the device."""


def room_bytes(limit_bytes: float) -> float:
    """A memory limit with a tolerance of a billionth.

    A search adds up bytes in another order than the check of its plan. All comparisons use this
    tolerance, so that they agree where a stage just fits.
    """
    return limit_bytes * (1 + _ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Bytes of a stage, from the asynchronous schedule.

    A device of a stage with r replicas, from which on there are R devices, has
    ``(R - 1) // r + 1`` minibatches in flight when it runs a forward. Each keeps what its layers
    save for the backward, what it received and what it sent; where weights are stashed, it may keep
    a version of the weights of its own, the newest of which are those in use. Predicted weights
    (SpecTrain) are a set for each of them beside those in use. Where r > 1, replicas keep up to two
    flat vectors of the parameters' size beside the gradients, to average these.

    Args:
        stash: versions are kept, one for each minibatch in flight (weight stashing); else one.
        predicted: these are predictions, none of which is the set in use (SpecTrain).
        optimizer: bytes of optimizer state for each byte of parameters: 1 for SGD with momentum,
            2 for Adam, 0 for plain SGD.
        gradients: bytes of gradients for each byte of parameters.
        reserved_bytes: of each device, for what else needs memory: the framework, kernels'
            workspaces, buffers of messages.

    Raises:
        ConfigError: one of them is negative.
    """

    stash: bool = True
    predicted: bool = False
    optimizer: float = 1.0
    gradients: float = 1.0
    reserved_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("optimizer", "gradients", "reserved_bytes"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ConfigError(
                    f"{name.removesuffix('_bytes')} bytes of the memory are {value}",
                    remedy="give a number that is not negative",
                )

    def in_flight(self, replicas: int, left: int) -> int:
        """Minibatches that each device of a stage has begun and not ended; ``left`` counts devices
        of this stage and of those after it.
        """
        return (left - 1) // replicas + 1

    def per_parameter_byte(self, in_flight: int, *, replicas: int) -> float:
        versions = in_flight + self.predicted if self.stash else 1
        buffers = REPLICA_BUFFERS if replicas > 1 else 0.0
        return versions + self.optimizer + self.gradients + buffers

    def beside_bytes(self, parameter_bytes: _Bytes, *, replicas: int) -> _Bytes:
        """Bytes beside those for backwards that a device keeps, with one version of the weights."""
        each = self.per_parameter_byte(1, replicas=replicas)
        return self.reserved_bytes + each * parameter_bytes

    def stage_bytes(
        self, parameter_bytes: float, stored_bytes: float, *, replicas: int, left: int
    ) -> float:
        """Bytes that each device of a stage keeps; ``stored_bytes`` are those of one minibatch."""
        in_flight = self.in_flight(replicas, left)
        weights = self.per_parameter_byte(in_flight, replicas=replicas) * parameter_bytes
        return self.reserved_bytes + weights + in_flight * stored_bytes


def plan_bytes(
    plan: Sequence[Choice], spans: Spans, pool: DevicePool, memory: MemoryModel
) -> list[tuple[float, float | None]]:
    """Bytes that each device of each stage keeps, and the limit of the smallest one, if known."""
    found = []
    for number, stage in enumerate(plan):
        kept = memory.stage_bytes(
            spans.parameter_bytes(stage.first, stage.end),
            spans.stored_bytes(stage.first, stage.end),
            replicas=sum(stage.counts),
            left=sum(sum(later.counts) for later in plan[number:]),
        )
        rooms = [
            kind.memory_bytes
            for kind, count in zip(pool.kinds, stage.counts, strict=True)
            if count and kind.memory_bytes is not None
        ]
        found.append((kept, min(rooms, default=None)))
    return found


def fits(
    plan: Sequence[Choice], spans: Spans, pool: DevicePool, memory: MemoryModel | None
) -> bool:
    """Whether each device holds what its stage keeps."""
    return memory is None or all(
        room is None or kept <= room_bytes(room)
        for kept, room in plan_bytes(plan, spans, pool, memory)
    )
