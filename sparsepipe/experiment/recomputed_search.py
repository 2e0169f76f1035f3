"""A plan, and the layers of its stages to recompute, which belong together.

Where these are to be chosen (``recompute=auto``), two plans are looked for: the best one of those
that fit the memory with all activations, as for any training, and the best one of those whose
weights fit, of which as many layers are recomputed as must be. The faster one is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.experiment.device_profiles import origin_of
from sparsepipe.experiment.recomputing import (
    choose,
    is_automatic,
    log_chosen,
    memory_settings,
    spans_told,
    with_spans,
)
from sparsepipe.experiment.schema import SearchChoice
from sparsepipe.experiment.search import Found, find_plan, memory_model
from sparsepipe.partition.recomputed_plan import Chosen
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan


def find_recomputing_plan(
    choice: SearchChoice,
    config: Mapping[str, Any],
    inventory: Inventory,
    profiles: Mapping[str, Profile],
    **origin: object,
) -> Found:
    """As :func:`~sparsepipe.experiment.search.find_plan`; the plan tells what is recomputed.

    Args:
        choice: see there.
        config: see there.
        inventory: see there.
        profiles: see there.
        **origin: see there.

    Raises:
        ConfigError: a setting does not suit the search or the plan, or a stage does not fit.
        SparsePipeError: as there.
    """
    if not is_automatic(config["parallel"]):
        found = find_plan(choice, config, inventory, profiles, **origin)
        return replace(
            found, plan=with_spans(found.plan, spans_told(found.plan, config["parallel"]))
        )
    options: list[tuple[float, Found, Chosen]] = []
    refused: PlanError | ConfigError | None = None
    for seen in (profiles, {name: _weights_only(p) for name, p in profiles.items()}):
        try:
            found = find_plan(choice, config, inventory, seen, **origin)
            chosen = chosen_for(found.plan, config, inventory, profiles)
        except (PlanError, ConfigError) as error:
            refused = error
            continue
        options.append((_time_s(found.plan, chosen), found, chosen))
    if not options:
        assert refused is not None
        raise refused
    _, found, chosen = min(options, key=lambda option: option[0])
    log_chosen(chosen)
    plan = with_spans(found.plan, chosen.spans)
    told = {name: origin_of(profiles[name]) for name in sorted(profiles)}
    return replace(
        found,
        plan=replace(plan, details={**plan.details, "profiles": told}),
        profiles={name: profiles[name] for name in found.profiles},
    )


def recomputing(
    plan: Plan, config: Mapping[str, Any], inventory: Inventory, profiles: Mapping[str, Profile]
) -> Plan:
    """A plan that is given, telling what is recomputed.

    Args:
        plan: on devices of the inventory.
        config: resolved and checked.
        inventory: the hardware.
        profiles: of its devices, by their names; they count where layers are to be chosen.

    Raises:
        ConfigError: the setting does not suit the plan, or a stage does not fit.
    """
    if not is_automatic(config["parallel"]):
        return with_spans(plan, spans_told(plan, config["parallel"]))
    chosen = chosen_for(plan, config, inventory, profiles)
    log_chosen(chosen)
    return with_spans(plan, chosen.spans)


def chosen_for(
    plan: Plan, config: Mapping[str, Any], inventory: Inventory, profiles: Mapping[str, Profile]
) -> Chosen:
    """The cheapest layers to recompute, with what the search counts of memory.

    Raises:
        ConfigError: a stage does not fit.
    """
    memory = memory_model(SearchChoice(**memory_settings(config["parallel"])), config)
    assert memory is not None
    return choose(plan, profiles, inventory, config["parallel"], memory)


def _weights_only(profile: Profile) -> Profile:
    """As if layers kept nothing for their backward."""
    layers = [
        replace(layer, saved_bytes=0.0, begin_bytes=0.0, end_bytes=0.0) for layer in profile.layers
    ]
    return replace(profile, layers=tuple(layers))


def _time_s(plan: Plan, chosen: Chosen) -> float:
    """Between two batches, by the costs of the search and what recomputing takes."""
    stages_s: list[float] = plan.details["stage_times_s"]
    again_s = [time_s / plan.replicas(stage) for stage, time_s in enumerate(chosen.times_s)]
    both_s = [a + b for a, b in zip(stages_s, again_s, strict=True)]
    return max(float(plan.details["bottleneck_s"]), *both_s)
