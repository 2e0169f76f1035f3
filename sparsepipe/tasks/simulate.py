"""The task ``simulate``: how fast a plan would train, without training it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.between import joined_by
from sparsepipe.config.division import division_of
from sparsepipe.config.recomputation import refuse_recompute
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Parallel, SearchChoice
from sparsepipe.errors import ConfigError
from sparsepipe.planning.device_profiles import (
    check_batch_sizes,
    fingerprint_of,
    load_profiles,
    other_workloads,
)
from sparsepipe.planning.search import memory_model
from sparsepipe.planning.simulated_plan import plan_to_simulate
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from sparsepipe.schedule.communication import INBOX_DEPTH
from sparsepipe.simulate.network import Algorithm, Sends
from sparsepipe.simulate.simulation import Simulation
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.run import Run
from sparsepipe.tasks.simulated_run import Outcome, in_short, write_outcome
from sparsepipe.tasks.simulated_ways import Contest, Scheduled, Ways

log = logging.getLogger(__name__)

_BUCKET_MIB = 25  # DDP's, where the strategy names none


def simulate(
    run: Run,
    *,
    parallel: dict[str, Any],
    minibatches: int = 154,
    schedule: str | None = None,
    microbatches: int | None = None,
    overlap: bool | None = None,
    all_reduce: Literal["ring", "direct", "chain", "ordered"] | None = None,
    outbox: int | None = None,
    inbox: int | None = INBOX_DEPTH,
    link_bytes_per_s: float | None = None,
    profiles: dict[str, str] | None = None,
    timeline_minibatches: int = 12,
) -> None:
    """Simulates an epoch; prints and writes throughput, shares of time and memory, and draws it.

    Args:
        run: configuration and directory.
        parallel: what is simulated, as a training would have it.
        minibatches: of an epoch, over all devices.
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
        timeline_minibatches: that the picture and the trace show.

    Raises:
        SparsePipeError: a setting, a profile, a link or the plan cannot be; or ranks would wait for
            one another for ever.
    """
    run.assert_one_rank()
    _check(minibatches, timeline_minibatches, link_bytes_per_s)
    spec = run.spec.replace(parallel=parallel)
    ways = _ways(
        spec.parallel,
        overlap=overlap,
        all_reduce=all_reduce,
        sends=Sends(outbox=outbox, inbox=inbox),
    )
    scheduled = Scheduled.of(spec.parallel, schedule, microbatches)
    inventory = joined_by(run.inventory, link_bytes_per_s)
    refuse_recompute(spec, inventory)
    measured = _profiles(spec, inventory)
    contest = _contest(spec, inventory, measured, ways, scheduled)
    outcome = _outcome(contest, spec, inventory, measured, (minibatches, timeline_minibatches))
    write_outcome(outcome, run.directory, title=_title(spec.parallel, scheduled.name, outcome.plan))
    write_result(run, {**outcome.values(), **_told(contest.plan, scheduled.name)})


def _ways(
    parallel: Parallel,
    *,
    overlap: bool | None,
    all_reduce: Algorithm | None,
    sends: Sends,
) -> Ways:
    """How to run what the strategy says, where the task leaves something open."""
    return Ways(
        overlap=overlap,
        all_reduce=all_reduce,
        sends=sends,
        bucket_mib=parallel.argument("bucket_cap_mb") or _BUCKET_MIB,
        mode=parallel.argument("mode", "stash"),
    )


def _profiles(spec: RunSpec, inventory: Inventory) -> dict[str, Profile]:
    """Of the inventory's devices; what they were measured on is told where data are others.

    Raises:
        ProfileError: one is broken or of another model, or they are of unlike batches.
    """
    found = load_profiles(
        inventory, spec.model.name, given=_given(spec), settings=spec.model.settings
    )
    check_batch_sizes(found)
    for told in other_workloads(found, spec):
        log.info("%s: the simulation is of what was measured", told)
    return found


def _contest(
    spec: RunSpec,
    inventory: Inventory,
    profiles: Mapping[str, Profile],
    ways: Ways,
    scheduled: Scheduled,
) -> Contest:
    plan = plan_to_simulate(spec, inventory, profiles)
    is_dp = spec.parallel.is_data_parallel
    if is_dp and scheduled.name != "asynchronous":
        raise ConfigError(
            f"task.schedule={scheduled.name} is of pipelines, and data parallelism has none",
            remedy="leave task.schedule out, or choose parallel=hete_mp, mp, exact or pipeline",
        )
    return Contest.of(plan, profiles, inventory, ways, is_dp=is_dp, scheduled=scheduled)


def _outcome(
    contest: Contest,
    spec: RunSpec,
    inventory: Inventory,
    profiles: Mapping[str, Profile],
    minibatches: tuple[int, int],
) -> Outcome:
    """What comes of it, of as many minibatches in an epoch and in the picture."""
    return Outcome.of(
        contest,
        minibatches=minibatches[0],
        shown=minibatches[1],
        memory=_memory(spec),
        batch_size=_batch_size(profiles, spec),
        rooms=_rooms(inventory, contest.plan.workload.plan),
    )


def _told(simulation: Simulation, schedule: str) -> dict[str, Any]:
    """What was simulated, for ``result.json``."""
    plan = simulation.workload.plan
    again = plan.details.get("recomputed")
    return {
        "schedule": schedule,
        "microbatches": simulation.microbatches,
        "plan_config": plan.config,
        "plan_cuts": list(plan.cuts),
        "plan_devices": [device for stage in plan.stages for device in stage.devices],
        **({"recomputed_layers": again} if simulation.recipe.splits and again else {}),
    }


def _check(minibatches: int, shown: int, link_bytes_per_s: float | None) -> None:
    for name, value in (("minibatches", minibatches), ("timeline_minibatches", shown)):
        if value < 1:
            raise ConfigError(f"task.{name}={value} is too little", remedy="set it to 1 or more")
    if link_bytes_per_s is not None and not 0 < link_bytes_per_s < math.inf:
        raise ConfigError(
            f"task.link_bytes_per_s={link_bytes_per_s:g} is no bandwidth",
            remedy="give bytes a second above 0, or leave it out: the inventory's link counts then",
        )


def _given(spec: RunSpec) -> dict[str, str]:
    """Files of profiles that the configuration names: the task's count before the search's."""
    search = spec.search
    searched = (search.profiles if search is not None else None) or {}
    return {**searched, **(spec.task.get("profiles") or {})}


def _memory(spec: RunSpec) -> Any:
    """What counts: as for the search, also where that leaves memory out of account."""
    search = spec.plan_search or SearchChoice()
    model = memory_model(replace(search, memory=True), spec)
    assert model is not None
    return model


def _batch_size(profiles: Mapping[str, Profile], spec: RunSpec) -> int:
    """Shapes of a minibatch: as they were measured, where profiles tell."""
    told = [profile.meta.get("batch_size") for profile in profiles.values()]
    return int(next((size for size in told if size), spec.data.get("batch_size")))


def _rooms(inventory: Inventory, plan: Plan) -> tuple[float | None, ...]:
    """Memory of each rank's device, where it is known."""
    rooms = {
        (host.name, device.name): device.memory_bytes
        for host in inventory.hosts
        for device in host.devices
    }
    devices = [device.split("/") for stage in plan.stages for device in stage.devices]
    return tuple(rooms[host, name] for host, name, _ in devices)


def _title(parallel: Parallel, schedule: str, plan: Plan) -> str:
    if parallel.is_data_parallel:
        return f"Data parallelism on {plan.num_ranks} devices, simulated"
    strategy = plan.details.get("strategy")
    by = f"{strategy}, " if strategy else ""
    return f"{by}{in_short(plan)}: {schedule} schedule, simulated"


def in_one_process(spec: RunSpec, inventory: Inventory) -> RunSpec:
    """The configuration of a task that is one process itself, whatever it simulates."""
    del inventory
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


def fingerprint(spec: RunSpec, inventory: Inventory) -> str:
    """Of the plan or the search that is chosen, and of the profiles.

    Raises:
        PlanError: the plan file is missing or is none.
        ProfileError: a profile is missing, broken or of another model.
    """
    chosen = spec.replace(parallel=spec.task.get("parallel"))
    division, search = division_of(chosen), chosen.plan_search
    told = {
        "profiles": fingerprint_of(inventory, spec.model.name, given=_given(chosen)),
        "plan": None if division is None else [division.arguments(), division.devices],
        "search": None if search is None else {**asdict(search), "profiles": None},
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


simulate.cores = 1  # type: ignore[attr-defined]
simulate.parallel = in_one_process  # type: ignore[attr-defined]
simulate.prepare = fingerprint  # type: ignore[attr-defined]
simulate.not_identity = (  # type: ignore[attr-defined]
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
