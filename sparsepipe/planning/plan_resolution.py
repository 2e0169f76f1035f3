"""The plan of a run: searched for and stored before its ranks start, or made for a simulation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.places import named_places, places
from sparsepipe.config.build import build_data, num_classes_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import SearchChoice
from sparsepipe.errors import ConfigError, HardwareError, PlanError, ProfileError, SparsePipeError
from sparsepipe.partition.devices import kinds_of
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.planning.division import Division
from sparsepipe.planning.measuring import RunJob, measure_devices, measure_link
from sparsepipe.planning.search import FoundPlan, find_plan, plan_table, recomputing
from sparsepipe.profiling import Profile, check_there
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan, Stage
from sparsepipe.utils.files import write_text_atomic, writing

log = logging.getLogger(__name__)


def resolve_plan(
    spec: RunSpec,
    inventory: Inventory,
    division: Division | None,
    directory: RunDir,
    *,
    run_job: RunJob | None,
) -> None:
    """Searches for a run's plan, or for the layers that its plan recomputes, and writes the plan to
    the run's directory; does nothing if the configuration gives both.

    A run that has begun keeps its plan: nothing is measured or searched for again. Without
    ``run_job``, which runs measurements, missing profiles and links are refused.

    Raises:
        SparsePipeError: a device cannot be measured, or no plan fits the devices.
    """
    choice, model = spec.plan_search, spec.model.name
    automatic = spec.parallel.recompute == "auto" and spec.task.get("search") is None
    if directory.plan.exists() or (choice is None and not automatic):
        return
    names = list(dict.fromkeys(kind.name for kind in kinds_of(inventory)))
    given = spec.given_profiles if choice is None else choice.profiles or {}
    profiles = load_profiles(inventory, model, given=given)
    missing = [name for name in names if name not in profiles]
    if missing and (run_job is None or choice is None):
        raise ProfileError(
            f"there is no profile of {model} on {', '.join(missing)}, and none is measured "
            + ("for a given plan" if choice is None else "under torchrun"),
            remedy="run `sparsepipe task=profile` on each, with the same model, data, backend and "
            "hardware, and name each profile.json in parallel.search.profiles, or as profile: "
            f"{{{model}: ...}} of its device in the hardware inventory; or, not under "
            "torchrun, let a search measure devices: parallel.search.search=hete_mp",
        )
    if choice is None:
        plan = plan_to_simulate(spec, division, inventory, profiles)
        with writing(directory.path):
            write_text_atomic(directory.plan, plan.to_json())
        return
    if spec.emulation is None:  # an emulation neither reads data nor measures links
        _check_classes(profiles, spec)
    found = _measure_and_search(spec, choice, inventory, profiles, missing=missing, run_job=run_job)
    log.info("%s", plan_table(found.explanation))
    with writing(directory.path):
        found.write(directory)


def _measure_and_search(
    spec: RunSpec,
    choice: SearchChoice,
    inventory: Inventory,
    known: Mapping[str, Profile],
    *,
    missing: Sequence[str],
    run_job: RunJob | None,
) -> FoundPlan:
    """Measures missing profiles and, on a single host, an unknown link; then finds the plan."""
    measured: dict[str, tuple[Profile, Path]] = {}
    if run_job is not None:
        measured = measure_devices(missing, spec, choice.measure, run_job=run_job)
    profiles = {**known, **{name: profile for name, (profile, _) in measured.items()}}
    origin: dict[str, Any] = {
        "measured": {name: str(path) for name, (_, path) in measured.items()},
        "profiling_s": sum(profile.meta.get("cost_s", 0.0) for profile in profiles.values()),
    }
    links = [host.link for host in inventory.hosts if any(d.count for d in host.devices)]
    needs_link = inventory.num_devices > 1 and choice.bandwidth_bytes_per_s is None
    if needs_link and links == [None] and run_job is not None and spec.emulation is None:
        bytes_per_s, path = measure_link(spec, run_job=run_job)
        choice = replace(choice, bandwidth_bytes_per_s=bytes_per_s)
        origin["measured_bandwidth"] = str(path)
    try:
        found = find_plan(choice, spec, inventory, profiles, **origin)
    except SparsePipeError as error:
        error.remedy = error.remedy.replace("task.", "parallel.search.")
        raise
    times = (f"{name}: {1e3 * profiles[name].compute_s:.1f} ms" for name in sorted(profiles))
    speed = choice.bandwidth_bytes_per_s
    log.info(
        "plan by %s (%s) from profiles (%s forward and backward) and %s",
        choice.search,
        choice.cost_model,
        ", ".join(times),
        "the links of the inventory" if speed is None else f"{speed / 1e6:.4g} MB/s",
    )
    return found


def _check_classes(profiles: Mapping[str, Profile], spec: RunSpec) -> None:
    """Refuses profiles of a network with another number of classes than the data have."""
    num_classes = {name: profile.meta.get("num_classes") for name, profile in profiles.items()}
    if not any(num_classes.values()):
        return
    data = build_data(spec)
    data.setup("fit")
    in_data = num_classes_of(data)
    for name, count in num_classes.items():
        if count not in (None, in_data):
            raise ProfileError(
                f"the profile of {name} is of a network for {count} classes, but the data have "
                f"{in_data}",
                remedy="measure the model with these data (task=profile), or leave the profile "
                "out: devices without one are measured before a training",
            )


def plan_to_simulate(
    spec: RunSpec, division: Division | None, inventory: Inventory, profiles: Mapping[str, Profile]
) -> Plan:
    """The plan that a configuration gives or searches for, with devices named ``host/model/number``
    and, in its details, the layers to recompute.

    Raises:
        ConfigError: the parallelism cannot be simulated.
        PlanError: the plan does not fit the layers or the devices, or a profile's graph branches.
        ProfileError: a device has no profile, or profiles are of different models.
        HardwareError: a link that the search needs has no bandwidth, or devices are too few.
    """
    if any(profile.states for profile in profiles.values()):
        raise PlanError(
            "a profile is of a branching graph, but only chains of layers can be simulated",
            remedy="profile the model with task=profile, which measures it as a chain of layers",
        )
    # Missing profiles, and profiles that do not agree, are reported later.
    num_layers = max((profile.num_layers for profile in profiles.values()), default=1)
    if spec.parallel.grid is not None or (division is not None and division.grids is not None):
        raise ConfigError(
            "the time of spatial parallelism cannot be predicted",
            remedy="choose parallel=dp, mp, hete_mp, exact or pipeline, give a plan without grids, "
            "or train with task=train",
        )
    if spec.parallel.is_data_parallel:
        return data_parallel(inventory, num_layers)
    if (choice := spec.search) is not None:
        try:
            return find_plan(choice, spec, inventory, profiles).plan
        except SparsePipeError as error:
            error.remedy = error.remedy.replace("task.", "parallel.search.")
            raise
    if division is None:
        raise ConfigError(
            "a run on one device never waits, so there is nothing to simulate",
            remedy="choose parallel=dp, mp, hete_mp, exact or pipeline",
        )
    if not profiles:  # the number of layers is unknown
        check_there((device.name for host in inventory.hosts for device in host.devices), profiles)
    plan = _plan_by_hand(division, inventory, num_layers)
    return recomputing(plan, spec, inventory, profiles)


def data_parallel(inventory: Inventory, num_layers: int) -> Plan:
    """One stage on all devices, host after host, the best order for a ring of replicas."""
    devices = tuple(place.text for place in places(inventory))
    return Plan(stages=(Stage(layers=(0, num_layers - 1), devices=devices),))


def _plan_by_hand(division: Division, inventory: Inventory, num_layers: int) -> Plan:
    """The plan by ``parallel.plan`` on the devices that it names, else on the first ones."""
    cuts, config = division.cuts, division.config
    if config is None and cuts is not None:
        config = "-".join("1" for _ in range(len(cuts) + 1))
    if config is None or (cuts is None and "-" in config):
        raise PlanError(
            "parallel.plan has no cuts: without them, FLOPs are counted on batches of data, but a "
            "simulation has no data",
            remedy="give parallel.plan.cuts, such as [24], or parallel.plan.file, or let a search "
            "find them (parallel=hete_mp)",
        )
    division.check(num_layers=num_layers)
    made = Plan.of(config=config, cuts=cuts or (), num_layers=num_layers)
    known = [place.text for place in places(inventory)]
    named = named_places(inventory, division.devices or ())
    with division.naming_file():
        if made.num_ranks > len(known):
            raise HardwareError(
                f"the plan is for {made.num_ranks} devices, but the inventory has {len(known)}",
                remedy="give parallel.plan fewer devices, or choose other hardware",
            )
        if named is not None and len({*named}) == len(named):
            known = [place.text for place in named]
        elif others := [name for name in division.devices or () if "/" in name]:
            raise PlanError(
                f"the plan is for {', '.join(others)}, but the inventory has {', '.join(known)}",
                remedy="choose the hardware that the plan was made for, or give its config and "
                "cuts as parallel.plan.config and parallel.plan.cuts",
            )
    devices = iter(known)
    return Plan(
        stages=tuple(
            Stage(layers=stage.layers, devices=tuple(next(devices) for _ in stage.devices))
            for stage in made.stages
        ),
        details=division.details,
    )
