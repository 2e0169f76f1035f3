"""The plan of a run by ``parallel.search``, found before its ranks start and kept with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_data, num_classes_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import SearchChoice
from sparsepipe.errors import ConfigError, ProfileError, SparsePipeError
from sparsepipe.partition.devices import kinds_of
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.planning.division import Division
from sparsepipe.planning.given_plan import plan_to_simulate
from sparsepipe.planning.measuring import RunJob, measure_devices, measure_link
from sparsepipe.planning.search import find_plan, plan_table
from sparsepipe.profiling import Profile
from sparsepipe.runs.rundir import RunDir
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
    """Finds the plan of a run that leaves it to a search, and writes it to its directory.

    A run that has begun keeps its plan: nothing is measured or searched for again. Without
    ``run_job``, which runs measurements, missing profiles and links are refused.

    Raises:
        SparsePipeError: a device cannot be measured, or no plan for the devices exists.
    """
    choice = spec.plan_search
    if directory.plan.exists():
        return
    if choice is None:
        searches = spec.task.get("search") is not None  # itself: task=partition
        if spec.parallel.recompute == "auto" and not searches:
            _resolve_by_hand(spec, inventory, division, directory)
        return
    profiles = load_profiles(inventory, spec.model.name, given=choice.profiles or {})
    emulated = spec.emulation is not None  # then data are never read, nor devices measured
    if not emulated:
        _check_classes(profiles, spec)
    missing = [name for name in _names(inventory) if name not in profiles]
    measured: dict[str, tuple[Profile, Path]] = {}
    if missing:
        if run_job is None:
            raise _missing(missing, spec.model.name, inventory)
        measured = measure_devices(missing, spec, choice.measure, run_job=run_job)
    profiles |= {name: profile for name, (profile, _) in measured.items()}
    origin: dict[str, Any] = {
        "measured": {name: str(path) for name, (_, path) in measured.items()},
        "profiling_s": sum(profile.meta.get("cost_s", 0.0) for profile in profiles.values()),
    }
    if run_job is not None and not emulated and _lacks_link(choice, inventory):
        bytes_per_s, path = measure_link(spec, run_job=run_job)
        choice = replace(choice, bandwidth_bytes_per_s=bytes_per_s)
        origin["measured_bandwidth"] = str(path)
    try:
        found = find_plan(choice, spec, inventory, profiles, **origin)
    except SparsePipeError as error:
        error.remedy = error.remedy.replace("task.", "parallel.search.")
        raise
    log.info("plan by %s", _origin(choice, profiles))
    log.info("%s", plan_table(found.explanation))
    with writing(directory.path):
        found.write(directory)


def _resolve_by_hand(
    spec: RunSpec, inventory: Inventory, division: Division | None, directory: RunDir
) -> None:
    """Chooses the recomputed layers of a given plan and writes that plan."""
    profiles = load_profiles(inventory, spec.model.name, given=spec.given_profiles)
    if missing := [name for name in _names(inventory) if name not in profiles]:
        raise ConfigError(
            f"parallel.strategy.recompute=auto goes by profiles, and there is none of "
            f"{spec.model.name} on {', '.join(missing)}",
            remedy="name files as parallel.search.profiles, or as profile of the devices in the "
            "hardware inventory (task=profile makes them); or leave the plan to a search, which "
            "measures devices: parallel.search.search=hete_mp",
        )
    plan = plan_to_simulate(spec, division, inventory, profiles)
    with writing(directory.path):
        write_text_atomic(directory.plan, plan.to_json())


def _lacks_link(choice: SearchChoice, inventory: Inventory) -> bool:
    (host,) = [host for host in inventory.hosts if any(device.count for device in host.devices)]
    several = inventory.num_devices > 1
    return several and choice.bandwidth_bytes_per_s is None and host.link is None


def _check_classes(profiles: Mapping[str, Profile], spec: RunSpec) -> None:
    """Refuses profiles of a network for other classes, which are known once the data are there."""
    num_classes = {name: profile.meta.get("num_classes") for name, profile in profiles.items()}
    if not any(num_classes.values()):
        return
    data = build_data(spec)
    data.setup("fit")
    there_are = num_classes_of(data)
    for name, count in num_classes.items():
        if count not in (None, there_are):
            raise ProfileError(
                f"the profile of {name} is of a network for {count} classes, the data have "
                f"{there_are}",
                remedy="measure the model with these data (task=profile), or leave the profile "
                "out: what lacks one is measured before a training",
            )


def _names(inventory: Inventory) -> list[str]:
    return list(dict.fromkeys(kind.name for kind in kinds_of(inventory)))


def _missing(names: list[str], model: str, inventory: Inventory) -> ProfileError:
    hosts = ", ".join(
        f"{device.name} (host {host.name})"
        for host in inventory.hosts
        for device in host.devices
        if device.count and device.name in names
    )
    chosen = ", then with ".join(f"task.device='{name}'" for name in names)
    return ProfileError(
        f"there is no profile of {model} on {hosts}, and under torchrun none is measured",
        remedy=f"run `sparsepipe task=profile` there with {chosen}, and with the same model, "
        f"data, backend and hardware, and name each profile.json as profile: {{{model}: ...}} of "
        "its device in the hardware inventory, or in parallel.search.profiles",
    )


def _origin(choice: SearchChoice, profiles: Mapping[str, Profile]) -> str:
    words = ", ".join(
        f"{name}: {1e3 * profiles[name].compute_s:.1f} ms forward and backward"
        for name in sorted(profiles)
    )
    speed = choice.bandwidth_bytes_per_s
    links = "the links of the inventory" if speed is None else f"{speed / 1e6:.4g} MB/s"
    return f"{choice.search} ({choice.cost_model}) from profiles ({words}) and {links}"
