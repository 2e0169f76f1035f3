"""The bytes that a stage keeps in the memory of each of its devices, and microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field

from sparsepipe.errors import ConfigError
from sparsepipe.partition.costs.layers import Floats, Ints, Spans
from sparsepipe.partition.devices import Choice, DevicePool
from sparsepipe.schedule import WARMUPS, Plan
from sparsepipe.schedule.plan import in_turn
from sparsepipe.utils.arguments import checked

_Amount = Annotated[float, Field(ge=0)]  # checked to be finite, too
_Bytes = TypeVar("_Bytes", float, Floats)

MIB = 2**20
"""Bytes in a MiB, the unit of memory in messages."""

REPLICA_BUFFERS = 2.0
"""The most bytes that a replica keeps for averaging gradients, for each byte of parameters: the sum
that it sends and the parts that it receives."""


def room_bytes(limit_bytes: float) -> float:
    """A memory limit plus a billionth as tolerance, since a search adds up bytes in a different
    order than the check of its plan.
    """
    return limit_bytes * (1 + 1e-9)


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Bytes that a device of a stage keeps in an asynchronous pipeline.

    With r replicas in a stage and R devices in this and all later stages, each device of the stage
    has ``(R - 1) // r + 1`` minibatches in flight. Each keeps what the layers save for its backward
    pass, the stage's input and output, and with weight stashing a version of the weights, the
    newest of which is in use. If r > 1, up to two vectors of the parameters' size serve to average
    gradients.

    Args:
        stash: whether each minibatch in flight keeps a version of the weights (weight stashing).
        predicted: whether these versions are predicted, in addition to the newest (SpecTrain).
        optimizer: bytes of optimizer state for each byte of parameters: 1 for SGD with momentum, 2
            for Adam, 0 for plain SGD.
        gradients: bytes of gradients for each byte of parameters.
        reserved_bytes: bytes of each device for everything else: the framework, workspaces of
            kernels, message buffers.
    """

    stash: bool = True
    predicted: bool = False
    optimizer: _Amount = 1.0
    gradients: _Amount = 1.0
    reserved_bytes: _Amount = 0.0

    def in_flight(self, replicas: int, left: int) -> int:
        """The number of minibatches in flight on each device of a stage; ``left`` is the number of
        devices of this and all later stages.
        """
        return (left - 1) // replicas + 1

    def per_parameter_byte(self, in_flight: int, *, replicas: int) -> float:
        versions = in_flight + self.predicted if self.stash else 1
        buffers = REPLICA_BUFFERS if replicas > 1 else 0.0
        return versions + self.optimizer + self.gradients + buffers

    def beside_bytes(self, parameter_bytes: _Bytes, *, replicas: int) -> _Bytes:
        """Bytes that a device keeps besides those for backward passes, with one weight version."""
        each = self.per_parameter_byte(1, replicas=replicas)
        return self.reserved_bytes + each * parameter_bytes

    def stage_bytes(
        self, parameter_bytes: float, stored_bytes: float, *, replicas: int, left: int
    ) -> float:
        """Bytes that each device keeps, of which ``stored_bytes`` for each minibatch in flight."""
        in_flight = self.in_flight(replicas, left)
        weights = self.per_parameter_byte(in_flight, replicas=replicas) * parameter_bytes
        return self.reserved_bytes + weights + in_flight * stored_bytes


def plan_bytes(
    plan: Sequence[Choice], spans: Spans, pool: DevicePool, memory: MemoryModel
) -> list[tuple[float, float | None]]:
    """For each stage, bytes that a device keeps, and its devices' least memory (None: unknown)."""
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
    """Whether each device has room for what its stage keeps; unknown memory counts as enough."""
    return memory is None or all(
        room is None or kept <= room_bytes(room)
        for kept, room in plan_bytes(plan, spans, pool, memory)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """How a synchronous schedule cuts a minibatch into microbatches.

    Args:
        schedule: ``gpipe``, ``1f1b``, ``eager_1f1b`` or the dotted path of another schedule.
        count: T, number of microbatches of a minibatch over all devices of the first stage.
        batch_size: number of samples that each of these devices reads for a minibatch, as in the
            profiles; None: unknown, and microbatches count as equally large.
    """

    schedule: str
    count: int
    batch_size: int | None

    @property
    def least_readers(self) -> int:
        """The fewest first-stage devices whose batches have a sample for each microbatch."""
        return 1 if self.batch_size is None else -(-self.count // self.batch_size)

    def in_flight(self, plan: Plan, stage: int) -> float:
        """Peak size of microbatches in flight on a stage's device, in multiples of the largest."""
        left = plan.num_ranks - plan.ranks_of(stage).start
        at_once = int(self.at_once(plan.replicas(stage), left))
        return self.in_flight_of(plan.replicas(stage), at_once, readers=plan.replicas(0))

    def at_once(self, replicas: Ints | int, left: Ints | int) -> Ints:
        """Peak number of microbatches, of any size, in flight on a device of a stage with
        ``replicas``; ``left`` is the number of devices of this and all later stages.
        """
        most = np.asarray(-(-self.count // replicas))
        if (warmups := WARMUPS.get(self.schedule)) is not None:
            most = np.minimum(most, warmups * ((left - 1) // replicas) + 1)
        return most

    def in_flight_of(self, replicas: int, at_once: int, *, readers: int) -> float:
        """As :meth:`in_flight`, given :meth:`at_once` and the number of first-stage ``readers``."""
        if self.count % readers == 0:
            return at_once  # all are equally large
        sizes = sizes_of(self.count, readers, batch_size=self.batch_size)
        turns = (in_turn(self.count, replica=n, replicas=replicas) for n in range(replicas))
        each = [[sizes[number] for number in own] for own in turns]
        held = (
            sum(own[n : n + at_once]) for own in each for n in range(max(1, len(own) - at_once + 1))
        )
        return max(held) / max(sizes)

    def share(self, readers: int) -> float:
        """Largest microbatch as a fraction of the batch of each of ``readers`` devices."""
        fewest = len(in_turn(self.count, replica=readers - 1, replicas=readers))
        return _share(max(1, fewest), self.batch_size)


def sizes_of(count: int, readers: int, *, batch_size: int | None = None) -> list[float]:
    """Sizes of the ``count`` microbatches of a minibatch, as fractions of one device's batch.

    The ``readers`` devices of the first stage take turns, and each cuts its batch into its own
    microbatches, which are equally large if the batch size is unknown.
    """
    found = [0.0] * count
    for reader in range(readers):
        own = in_turn(count, replica=reader, replicas=readers)
        for number in own:
            found[number] = _share(len(own), batch_size)
    return found


def check_microbatches(
    count: int, replicas: Sequence[int] = (), *, name: str = "microbatches"
) -> None:
    """Raises a ConfigError if ``count`` (``name``) is invalid or less than any of ``replicas``."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(
            f"{name}={count!r} is not a valid number of microbatches",
            remedy="give a whole number of at least 1",
        )
    if (most := max(replicas, default=0)) > count:
        raise ConfigError(
            f"{name}={count} is less than {most}, the number of devices of stage "
            f"{replicas.index(most)} (plan {'-'.join(map(str, replicas))}), "
            "some of which would get none",
            remedy=f"set {name} to at least {most}, ideally to a multiple of each stage's devices",
        )


def _share(count: int, batch_size: int | None) -> float:
    return 1 / count if batch_size is None else -(-batch_size // count) / batch_size
