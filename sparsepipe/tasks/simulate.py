"""The task ``simulate``: how fast a plan would train, without training it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.inventory import joined_by, joined_where_missing
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import SearchChoice
from sparsepipe.errors import ConfigError
from sparsepipe.planning.device_profiles import (
    as_loaded,
    check_batch_sizes,
    fingerprint_of,
    load_profiles,
    other_workloads,
)
from sparsepipe.planning.division import Division, division_of
from sparsepipe.planning.given_plan import plan_to_simulate
from sparsepipe.planning.recomputation import refuse_recompute
from sparsepipe.planning.search import memory_model
from sparsepipe.profiling import Profile
from sparsepipe.schedule.communication import INBOX_DEPTH
from sparsepipe.simulate.network import Sends
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.simulate_domains import Domains, check_parallel
from sparsepipe.tasks.simulation import (
    CommunicationSettings,
    Comparison,
    Scheduled,
    SimulationFigures,
    in_short,
    write_figures,
)
from sparsepipe.tasks.task import ResolvedRun, Task

log = logging.getLogger(__name__)

_BUCKET_MIB = 25  # DDP's, where the strategy names none


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate(Task):
    """Simulates an epoch: throughput, shares of time and memory, a picture and a trace.

    Attributes:
        parallel: the strategy that is simulated, as a training would have it.
        minibatches: minibatches of an epoch, over all devices.
        schedule: see :data:`sparsepipe.simulate.simulation.SCHEDULES`; None: the strategy's.
        microbatches: parts of a minibatch, where the schedule has some; None: as the strategy
            says, else 4.
        overlap: sums over replicas overlap with the backward; None: in data parallelism only.
        all_reduce: how replicas sum; None: as the runtime does.
        outbox: see ``simulate.network.Sends``; by default no limit, since in training
            there is room for all that can be under way.
        inbox: the same; by default as in training.
        link_bytes_per_s: between hosts, for the search of a plan as well; None: the inventory's.
        profiles: files by the names of devices, in place of those that the inventory names.
        timeline_minibatches: minibatches that the picture and the trace show.
    """

    cores: ClassVar[int | None] = 1
    chooses_devices: ClassVar[bool] = True
    not_identity: ClassVar[tuple[str, ...]] = (
        "parallel",
        "task.parallel.devices",
        "task.parallel.grace_s",
        "task.parallel.max_restarts",
        "task.parallel.num_nodes",
        "task.parallel.plan",
        "task.parallel.search",
        "task.parallel.strategy.timeout_s",
        "task.profiles",
    )

    parallel: dict[str, Any]
    minibatches: Annotated[int, Field(ge=1)] = 154
    schedule: str | None = None
    microbatches: int | None = None
    overlap: bool | None = None
    all_reduce: Literal["ring", "direct", "chain", "ordered"] | None = None
    outbox: int | None = None
    inbox: int | None = INBOX_DEPTH
    link_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    profiles: dict[str, str] | None = None
    timeline_minibatches: Annotated[int, Field(ge=1)] = 12

    def run(self, run: ResolvedRun) -> None:
        """Simulates, as one process, and writes the results.

        Raises:
            SparsePipeError: a setting, a profile, a link or the plan is impossible; or ranks would
                wait for one another for ever.
        """
        spec = run.spec.replace(parallel=self.parallel)
        if spec.parallel.roles is not None:
            write_result(run, self._domains(run, spec))
            return
        scheduled = Scheduled.of(spec.parallel, self.schedule, self.microbatches)
        inventory = joined_by(run.inventory, self.link_bytes_per_s)
        if (search := spec.plan_search) is not None:  # which has a speed for all links
            inventory = joined_where_missing(inventory, search.bandwidth_bytes_per_s)
        division = division_of(spec)
        refuse_recompute(spec, inventory, division)
        profiles = self._profiles(spec, inventory)
        comparison = self._comparison(spec, division, inventory, profiles, scheduled)
        plan = comparison.plan.workload.plan
        rooms = {
            (host.name, device.name): device.memory_bytes
            for host in inventory.hosts
            for device in host.devices
        }
        devices = [device for stage in plan.stages for device in stage.devices]
        places = [device.split("/") for device in devices]
        # The memory model of the search, also where the search ignores memory.
        memory = memory_model(replace(search or SearchChoice(), memory=True), spec)
        assert memory is not None
        figures = SimulationFigures.of(
            comparison,
            minibatches=self.minibatches,
            shown=self.timeline_minibatches,
            memory=memory,
            batch_size=_batch_size(profiles, spec),
            rooms=[rooms[host, name] for host, name, _ in places],
        )
        log.info(
            "an epoch is taken to have task.minibatches=%d, whatever the data have",
            self.minibatches,
        )
        if spec.parallel.is_data_parallel:
            title = f"Data parallelism on {plan.num_ranks} devices, simulated"
        else:
            strategy = plan.details.get("strategy")
            by = f"{strategy}, " if strategy else ""
            title = f"{by}{in_short(plan)}: {scheduled.name} schedule, simulated"
        write_figures(figures, run.directory, title=title)
        again = plan.details.get("recomputed") if comparison.plan.recipe.splits else None
        about_plan = {
            "schedule": scheduled.name,
            "microbatches": comparison.plan.microbatches,
            "plan_config": plan.config,
            "plan_cuts": list(plan.cuts),
            "plan_devices": devices,
            **({"recomputed_layers": again} if again else {}),
        }
        write_result(run, {**figures.values(), **about_plan})

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """The task itself is one process, whatever it simulates."""
        return in_one_process(spec)

    def prepare(self, run: ResolvedRun) -> str:
        """A fingerprint of the plan or the search that is chosen, and of the profiles.

        Raises:
            PlanError: the plan file is missing or broken.
            ProfileError: a profile is missing, broken or of another model.
        """
        spec, inventory = run.spec.replace(parallel=self.parallel), run.inventory
        division, search = division_of(spec), spec.plan_search
        given = self._given(spec)
        words = {
            "profiles": fingerprint_of(inventory, spec.model.name, given=given, spec=spec),
            "plan": None if division is None else [division.arguments(), division.devices],
            "search": None if search is None else {**asdict(search), "profiles": None},
        }
        return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:16]

    def _given(self, spec: RunSpec) -> dict[str, str]:
        """Profile files: the task's before those of the search."""
        searched = (spec.search.profiles if spec.search is not None else None) or {}
        return {**searched, **(self.profiles or {})}

    def _profiles(self, spec: RunSpec, inventory: Inventory) -> dict[str, Profile]:
        """Profiles of the inventory's devices; logs where their data differ from the run's."""
        model = spec.model
        found = load_profiles(
            inventory, model.name, given=self._given(spec), settings=model.settings
        )
        check_batch_sizes(found)
        for difference in other_workloads(found, spec):
            log.info("%s: the simulation is of what was measured", difference)
        return as_loaded(found, spec, inventory)

    def _domains(self, run: ResolvedRun, spec: RunSpec) -> dict[str, Any]:
        """Simulates domains over ranks and writes files; the entries of ``result.json``."""
        names = ("schedule", "microbatches", "overlap", "outbox")
        check_parallel(spec.parallel, others={name: getattr(self, name) for name in names})
        inventory = joined_by(run.inventory, self.link_bytes_per_s)
        profiles = self._profiles(spec, inventory)
        found = Domains.of(
            inventory,
            profiles,
            batch_size=_batch_size(profiles, spec),
            algorithm=self.all_reduce or "ordered",
        )
        return found.write(
            run.directory, minibatches=self.minibatches, shown=self.timeline_minibatches
        )

    def _comparison(
        self,
        spec: RunSpec,
        division: Division | None,
        inventory: Inventory,
        profiles: Mapping[str, Profile],
        scheduled: Scheduled,
    ) -> Comparison:
        plan = plan_to_simulate(spec, division, inventory, profiles)
        is_dp = spec.parallel.is_data_parallel
        if is_dp and scheduled.name != "asynchronous":
            raise ConfigError(
                f"task.schedule={scheduled.name} is of pipelines, and data parallelism has none",
                remedy="leave task.schedule out, or choose parallel=hete_mp, mp, exact or pipeline",
            )
        settings = CommunicationSettings(
            overlap=self.overlap,
            all_reduce=self.all_reduce,
            sends=Sends(outbox=self.outbox, inbox=self.inbox),
            bucket_mib=spec.parallel.argument("bucket_cap_mb") or _BUCKET_MIB,
            mode=spec.parallel.argument("mode", "stash"),
        )
        return Comparison.of(plan, profiles, inventory, settings, is_dp=is_dp, scheduled=scheduled)


def _batch_size(profiles: Mapping[str, Profile], spec: RunSpec) -> int:
    """Shapes of a minibatch, by the profiles if they have it."""
    sizes = [profile.meta.get("batch_size") for profile in profiles.values()]
    return int(next((size for size in sizes if size), spec.data.get("batch_size")))


def in_one_process(spec: RunSpec) -> RunSpec:
    """A configuration of one process, whatever ``parallel`` is."""
    parallel = {
        "devices": 1,
        "num_nodes": 1,
        "grace_s": spec.parallel.grace_s,
        "max_restarts": 0,
        "strategy": None,
        "plan": None,
        "search": None,
    }
    return spec.replace(parallel=parallel)
