"""How large microbatches are, and how many of them a device has in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsepipe.errors import ConfigError
from sparsepipe.partition.costs.layers import Ints
from sparsepipe.schedule import WARMUPS, Plan
from sparsepipe.schedule.plan import in_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """How a synchronous schedule cuts a minibatch.

    Args:
        schedule: ``gpipe``, ``1f1b``, ``eager_1f1b`` or the dotted path of another one.
        count: T, into which what all devices of the first stage read is cut.
        batch_size: samples that each of these reads, and of which the profiles are; None where
            unknown: microbatches are taken to be equal then.
    """

    schedule: str
    count: int
    batch_size: int | None

    @property
    def least_readers(self) -> int:
        """Devices of the first stage, of which fewer read too few samples to fill all of them."""
        return 1 if self.batch_size is None else -(-self.count // self.batch_size)

    def in_flight(self, plan: Plan, stage: int) -> float:
        """Microbatches that a device of a stage has begun and not ended, at most.

        Smaller ones than the largest count less.
        """
        left = plan.num_ranks - plan.ranks_of(stage).start
        at_once = int(self.at_once(plan.replicas(stage), left))
        return self.in_flight_of(plan.replicas(stage), at_once, readers=plan.replicas(0))

    def at_once(self, replicas: Ints | int, left: Ints | int) -> Ints:
        """Microbatches, large or small, that a device of a stage has begun and not ended, at most;
        ``left`` counts devices of this stage and of those after it.
        """
        most = np.asarray(-(-self.count // replicas))
        if (warmups := WARMUPS.get(self.schedule)) is not None:
            most = np.minimum(most, warmups * ((left - 1) // replicas) + 1)
        return most

    def in_flight_of(self, replicas: int, at_once: int, *, readers: int) -> float:
        """As :meth:`in_flight`, of a stage of some devices."""
        if self.count % readers == 0:
            return at_once  # which all are as large
        sizes = sizes_of(self.count, readers, batch_size=self.batch_size)
        turns = (in_turn(self.count, replica=n, replicas=replicas) for n in range(replicas))
        each = [[sizes[number] for number in own] for own in turns]
        held = (
            sum(own[n : n + at_once]) for own in each for n in range(max(1, len(own) - at_once + 1))
        )
        return max(held) / max(sizes)

    def share(self, readers: int) -> float:
        """Size of the largest one over that of the batch that the profiles are of."""
        fewest = len(in_turn(self.count, replica=readers - 1, replicas=readers))
        return _share(max(1, fewest), self.batch_size)


def sizes_of(count: int, readers: int, *, batch_size: int | None = None) -> list[float]:
    """Sizes of all microbatches of a minibatch, each over that of the batch that a device reads.

    Devices of the first stage take turns at them, and each cuts its batch into its own, which are
    as large as one another where the batch size is unknown.
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
    """Refuses a number of parts of a minibatch."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(
            f"{name}={count!r} is no number of parts of a minibatch",
            remedy="give a whole number, 1 or more",
        )
    if (most := max(replicas, default=0)) > count:
        raise ConfigError(
            f"{name}={count} are fewer than the {most} devices of stage {replicas.index(most)} "
            f"(plan {'-'.join(map(str, replicas))}), which take turns at them",
            remedy=f"set {name} to {most} or more, best to a multiple of each stage's devices",
        )


def _share(count: int, batch_size: int | None) -> float:
    return 1 / count if batch_size is None else -(-batch_size // count) / batch_size
