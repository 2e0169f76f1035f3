"""What is simulated beside each other: a plan, and data parallelism on all the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparsepipe.cluster import Inventory
from sparsepipe.config.schema import MICROBATCHES_KEY, Parallel
from sparsepipe.errors import HardwareError, ProfileError
from sparsepipe.partition.activation_checkpointing.setting import spans_told_by
from sparsepipe.planning.simulated_plan import data_parallel
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.network import Algorithm, Network, Sends
from sparsepipe.simulate.simulation import SCHEDULES, Simulation
from sparsepipe.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How ranks talk: what is said of it; where nothing is, as the runtime lets them.

    Args:
        overlap: sums over replicas overlap with the backward; None: in data parallelism only.
        all_reduce: how replicas sum; None: a ring in data parallelism, else in the
            order of the ranks (:mod:`sparsepipe.schedule.communication`).
        sends: how messages are handed over.
        bucket_mib: parts of sums that overlap.
        mode: which weights a minibatch sees (:class:`~sparsepipe.simulate.workload.Workload`).
    """

    overlap: bool | None
    all_reduce: Algorithm | None
    sends: Sends
    bucket_mib: float
    mode: str

    def setting(self, plan: Plan, inventory: Inventory, *, is_dp: bool) -> Setting:
        """Of a plan.

        Raises:
            HardwareError: a link that is needed has no bandwidth.
        """
        overlaps = is_dp if self.overlap is None else self.overlap
        return Setting(
            network=Network.of(inventory, plan),
            sends=self.sends,
            algorithm=self.all_reduce or ("ring" if is_dp else "ordered"),
            bucket_bytes=self.bucket_mib * 2.0**20 if overlaps else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """Which schedule is simulated.

    Args:
        name: see :data:`sparsepipe.simulate.simulation.SCHEDULES`.
        microbatches: T; None: see :meth:`Simulation.of`.
        option: of the configuration that says T.
    """

    name: str
    microbatches: int | None
    option: str = "task.microbatches"

    @classmethod
    def of(cls, parallel: Parallel, name: str | None, microbatches: int | None) -> Scheduled:
        """The strategy's, where the task says nothing.

        Args:
            parallel: resolved and checked.
            name: that the task says, if it does.
            microbatches: likewise.
        """
        synchronous = parallel.synchronous
        if name is None:
            name = "asynchronous" if synchronous is None else synchronous.schedule
        made = cls(name=name, microbatches=microbatches)
        if microbatches is not None or synchronous is None or not made.splits:
            return made
        return cls(name=name, microbatches=synchronous.microbatches, option=MICROBATCHES_KEY)

    @property
    def splits(self) -> bool:
        """Whether minibatches are split; not by a schedule that there is not."""
        return self.name in SCHEDULES and SCHEDULES[self.name].splits


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A plan, and what it is compared with: data parallelism on all devices of the inventory.

    These are what a user has in place of the plan, which may leave some of them out.

    Attributes:
        plan: under its schedule.
        dp: data parallelism with the settings of :class:`Ways`, which may let its sums overlap with
            the backward; these go in a ring, but for a plan that is data parallelism itself. None
            where it cannot be simulated.
        dp_apart: the same with sums after the backward.
        without_dp: why it cannot.
    """

    plan: Simulation
    dp: Simulation | None
    dp_apart: Simulation | None
    without_dp: str = ""

    @classmethod
    def of(
        cls,
        plan: Plan,
        profiles: Mapping[str, Profile],
        inventory: Inventory,
        ways: Ways,
        *,
        is_dp: bool,
        scheduled: Scheduled,
    ) -> Contest:
        """Of a plan on all or some devices of an inventory.

        Args:
            plan: what is simulated. What its details say is recomputed is so under synchronous
                schedules.
            profiles: of the devices.
            inventory: the hardware.
            ways: how ranks talk.
            is_dp: the plan is data parallelism.
            scheduled: the plan's schedule.

        Raises:
            ConfigError: there is no such schedule, or what is said does not suit it or the plan.
            ProfileError: a device of the plan has no profile.
            PlanError: the plan does not fit the profiles.
            HardwareError: a link that the plan needs has no bandwidth.
        """
        workload = Workload.of(plan, profiles, mode=ways.mode)
        if scheduled.splits:
            workload = workload.recomputing(spans_told_by(plan), profiles)
        simulated = Simulation.of(
            workload,
            ways.setting(plan, inventory, is_dp=is_dp),
            schedule=scheduled.name,
            microbatches=scheduled.microbatches,
            option=scheduled.option,
        )
        everywhere = data_parallel(inventory, plan.num_layers)
        beside = ways if is_dp else replace(ways, all_reduce=None)  # said of the plan's replicas
        try:
            dp = Simulation.of(
                Workload.of(everywhere, profiles), beside.setting(everywhere, inventory, is_dp=True)
            )
        except (HardwareError, ProfileError) as error:  # of what the plan does without
            return cls(plan=simulated, dp=None, dp_apart=None, without_dp=error.message)
        apart = replace(dp, setting=replace(dp.setting, bucket_bytes=None))
        return cls(plan=simulated, dp=dp, dp_apart=apart)
