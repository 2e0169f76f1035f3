"""How large microbatches are, and how many of them a device has in flight."""

from __future__ import annotations

from dataclasses import dataclass

from sparsepipe.schedule import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """How a synchronous schedule cuts a minibatch.

    Args:
        schedule: ``gpipe`` or ``1f1b``.
        count: T, into which what all devices of the first stage read is cut.
        batch_size: samples that each of these reads, and of which the profiles are; None where
            nobody knows: microbatches are taken for even then.
    """

    schedule: str
    count: int
    batch_size: int | None

    def in_flight(self, plan: Plan, stage: int) -> float:
        """Microbatches that a device of a stage has begun and not ended, at most.

        Smaller ones than the largest count less.
        """
        left = plan.num_ranks - plan.ranks_of(stage).start
        return self.in_flight_of(plan.replicas(stage), left, readers=plan.replicas(0))

    def in_flight_of(self, replicas: int, left: int, *, readers: int) -> float:
        """The same of a stage of some devices.

        Args:
            replicas: r, devices of the stage.
            left: R, devices of this stage and of those after it.
            readers: devices of the first stage.
        """
        most = -(-self.count // replicas)
        if self.schedule != "gpipe":
            most = min(most, (left - 1) // replicas + 1)
        if self.count % readers == 0:
            return most  # which all are as large
        sizes = self.sizes(readers)
        each = [sizes[device::replicas] for device in range(replicas)]
        held = (sum(own[n : n + most]) for own in each for n in range(max(1, len(own) - most + 1)))
        return max(held) / max(sizes)

    def sizes(self, readers: int) -> list[float]:
        """Of all of them, each over that of the batch that the profiles are of.

        Devices of the first stage take turns at them, and each cuts its batch into its own.

        Args:
            readers: devices of the first stage.
        """
        total = self.count
        own = [len(range(number % readers, total, readers)) for number in range(total)]
        return [self._share_of(each) for each in own]

    def share(self, readers: int) -> float:
        """Size of the largest one over that of the batch that the profiles are of.

        Args:
            readers: devices of the first stage.
        """
        return self._share_of(max(1, self.count // readers))

    def _share_of(self, count: int) -> float:
        """The same, of a batch that is cut into some."""
        if self.batch_size is None:
            return 1 / count
        return -(-self.batch_size // count) / self.batch_size
