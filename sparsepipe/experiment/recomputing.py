"""Which layers a synchronous pipeline recomputes: as ``parallel.strategy.recompute`` says.

``auto`` is replaced before ranks start, by what fits the devices' memory; the run's plan file then
tells the spans, as ``recomputed``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.places import places
from sparsepipe.errors import ConfigError
from sparsepipe.experiment.schedules import synchronous_of
from sparsepipe.partition.memory import MIB, MemoryModel
from sparsepipe.partition.recomputed_layers import (
    Setting,
    StageSpans,
    bounds_of,
    check_setting,
    in_words,
    recomputed_spans,
)
from sparsepipe.partition.recomputed_plan import Chosen, Parts, choose_spans
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan

log = logging.getLogger(__name__)


def recompute_of(parallel: Mapping[str, Any]) -> Setting:
    """What ``parallel.strategy`` says; ``none`` of one that is no synchronous pipeline.

    Args:
        parallel: resolved and checked.
    """
    if synchronous_of(parallel) is None:
        return "none"
    setting: Setting = parallel["strategy"].get("recompute", "none")
    return setting


def is_automatic(parallel: Mapping[str, Any]) -> bool:
    """Whether somebody has to choose the layers."""
    return recompute_of(parallel) == "auto"


def memory_settings(parallel: Mapping[str, Any]) -> dict[str, Any]:
    """What ``parallel.search`` says of memory, which counts for the choice of layers as well.

    Args:
        parallel: resolved and checked.
    """
    search = parallel.get("search") or {}
    return {name: search[name] for name in ("optimizer_bytes", "reserved_bytes") if name in search}


def refuse_recompute(config: Mapping[str, Any], inventory: Inventory) -> None:
    """Refuses what can be refused before anything is prepared.

    Raises:
        ConfigError: the setting says no layers; or they are to be chosen, and nobody knows the
            stages or the memory of the devices.
    """
    parallel = config["parallel"]
    check_setting(recompute_of(parallel))
    if not is_automatic(parallel):
        return
    plan, search = parallel.get("plan") or {}, parallel.get("search") or {}
    by_hand = any(plan.get(name) is not None for name in ("file", "cuts"))
    by_hand = by_hand or "-" not in str(plan.get("config") or "-")  # a single stage
    if not by_hand and search.get("search") is None:
        raise ConfigError(
            "parallel.strategy.recompute=auto goes by profiles of the stages, and neither a search "
            "nor parallel.plan tells these before training",
            remedy="set parallel.search.search=hete_mp, which measures the devices where they have "
            "no profile; or give parallel.plan.file or parallel.plan.cuts, and profiles as "
            "parallel.search.profiles or in the hardware inventory",
        )
    unknown = [
        device.name
        for host in inventory.hosts
        for device in host.devices
        if device.count and device.memory_bytes is None
    ]
    if unknown:
        raise ConfigError(
            f"parallel.strategy.recompute=auto fits the memory of devices, and that of "
            f"{', '.join(dict.fromkeys(unknown))} is not known",
            remedy="give memory_bytes of each device in the hardware inventory, or say which "
            "layers to recompute",
        )


def choose(
    plan: Plan,
    profiles: Mapping[str, Profile],
    inventory: Inventory,
    parallel: Mapping[str, Any],
    memory: MemoryModel,
) -> Chosen:
    """The cheapest layers to recompute with which all stages fit their devices.

    A batch is what a device of the first stage reads, and what profiles are of.

    Args:
        plan: on devices of the inventory.
        profiles: of these, by their models.
        inventory: with the memory of each.
        parallel: with the schedule.
        memory: what devices keep beside activations.

    Raises:
        ConfigError: a stage does not fit.
    """
    synchronous = synchronous_of(parallel)
    assert synchronous is not None, "no other strategy has the option"
    told = (profile.meta.get("batch_size") for profile in profiles.values())
    sizes = {int(size) for size in told if size is not None}
    return choose_spans(
        plan,
        profiles,
        _limits(inventory),
        memory=replace(memory, stash=False, predicted=False),
        parts=Parts(
            schedule=synchronous.schedule,
            microbatches=synchronous.microbatches,
            batch_size=max(sizes, default=None),
        ),
    )


def with_spans(plan: Plan, spans: StageSpans) -> Plan:
    """The plan whose file tells what is recomputed, if anything is."""
    details = {key: value for key, value in plan.details.items() if key != "recomputed"}
    bounds = bounds_of(spans)
    return replace(plan, details={**details, "recomputed": bounds} if bounds else details)


def spans_told(plan: Plan, parallel: Mapping[str, Any]) -> StageSpans:
    """What a setting that names layers means in a plan.

    Raises:
        ConfigError: the plan has no such layers or stages.
    """
    return recomputed_spans(recompute_of(parallel), plan)


def settled_recompute(parallel: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, Any]:
    """The strategy's argument where it is not what the configuration says.

    Args:
        parallel: resolved and checked.
        details: of the run's plan file.
    """
    if not is_automatic(parallel):
        return {}
    bounds = details.get("recomputed")
    return {"recompute": {"layers": bounds} if bounds else "none"}


def log_chosen(chosen: Chosen) -> None:
    """What is recomputed, in words."""
    if not any(chosen.spans):
        log.info("all stages fit their devices without recomputing activations")
        return
    for number, spans in enumerate(chosen.spans):
        if spans:
            log.info(
                "stage %d recomputes layers %s: %.3g ms more for a batch, %.1f MiB of "
                "activations in %.1f MiB",
                number,
                in_words((spans,)),
                1e3 * chosen.times_s[number],
                chosen.peaks_bytes[number] / MIB,
                chosen.rooms_bytes[number] / MIB,
            )


def _limits(inventory: Inventory) -> dict[str, float]:
    """Memory of each device, by the name that plans give it."""
    memory = {
        (host.name, device.name): device.memory_bytes
        for host in inventory.hosts
        for device in host.devices
    }
    found = {place.text: memory[place.host, place.name] for place in places(inventory)}
    return {name: float(limit) for name, limit in found.items() if limit is not None}
