"""What is simulated beside each other: a plan, and data parallelism on the same devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sparsepipe.cluster import Inventory
from sparsepipe.experiment.simulated_plan import data_parallel
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from sparsepipe.simulate.links import Algorithm, Sends
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.run import Setting
from sparsepipe.simulate.schedules import Simulation
from sparsepipe.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How ranks talk: what is said of it; where nothing is, as the runtime lets them.

    Args:
        overlap: sums over replicas overlap with the backward; None: in data parallelism only.
        all_reduce: how replicas sum; None: a ring in data parallelism, else in the
            order of the ranks (:mod:`sparsepipe.schedule.sums`).
        sends: how messages are handed over.
        link_bytes_per_s: between hosts; None: the inventory's.
        bucket_mib: parts of sums that overlap.
        stashes: weights that minibatches in flight went forward with are kept.
    """

    overlap: bool | None
    all_reduce: Algorithm | None
    sends: Sends
    link_bytes_per_s: float | None
    bucket_mib: float
    stashes: bool

    def setting(self, plan: Plan, inventory: Inventory, *, is_dp: bool) -> Setting:
        """Of a plan.

        Raises:
            HardwareError: a link that is needed has no bandwidth.
        """
        devices = [device for stage in plan.stages for device in stage.devices]
        overlaps = is_dp if self.overlap is None else self.overlap
        return Setting(
            network=Network.of(inventory, devices, between_bytes_per_s=self.link_bytes_per_s),
            sends=self.sends,
            algorithm=self.all_reduce or ("ring" if is_dp else "ordered"),
            bucket_bytes=self.bucket_mib * 2.0**20 if overlaps else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A plan, and what it is compared with.

    Attributes:
        plan: under its schedule.
        dp: data parallelism, talking as it is said of ranks.
        dp_apart: the same, each sum after its backward.
    """

    plan: Simulation
    dp: Simulation
    dp_apart: Simulation

    @classmethod
    def of(
        cls,
        plan: Plan,
        profiles: Mapping[str, Profile],
        inventory: Inventory,
        ways: Ways,
        *,
        is_dp: bool,
        schedule: str,
        microbatches: int | None,
    ) -> Contest:
        """Of a plan on all or some devices of an inventory; data parallelism is on all.

        Args:
            plan: what is simulated.
            profiles: of the devices.
            inventory: the hardware.
            ways: how ranks talk.
            is_dp: the plan is data parallelism.
            schedule: see :data:`sparsepipe.simulate.schedules.SCHEDULES`.
            microbatches: see :meth:`Simulation.of`.

        Raises:
            ConfigError: there is no such schedule, or what is said does not suit it.
            ProfileError: a device has no profile.
            PlanError: the plan does not fit the profiles.
            HardwareError: a link that is needed has no bandwidth.
        """
        simulated = Simulation.of(
            Workload.of(plan, profiles, stashes=ways.stashes),
            ways.setting(plan, inventory, is_dp=is_dp),
            schedule=schedule,
            microbatches=microbatches,
        )
        everywhere = data_parallel(inventory, plan.num_layers)
        dp = Simulation.of(
            Workload.of(everywhere, profiles), ways.setting(everywhere, inventory, is_dp=True)
        )
        apart = replace(dp, setting=replace(dp.setting, bucket_bytes=None))
        return cls(plan=simulated, dp=dp, dp_apart=apart)
