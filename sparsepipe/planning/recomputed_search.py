"""A plan, and the layers of its stages to recompute, which belong together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from sparsepipe.cluster import Inventory
from sparsepipe.config.recomputation import (
    choose,
    is_automatic,
    log_chosen,
    spans_told,
    synchronous_stages_of,
    with_spans,
)
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import SearchChoice
from sparsepipe.partition.activation_checkpointing.selection import Chosen
from sparsepipe.planning.search import Found, find_plan, memory_model
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan

log = logging.getLogger(__name__)


def find_recomputing_plan(
    choice: SearchChoice,
    spec: RunSpec,
    inventory: Inventory,
    profiles: Mapping[str, Profile],
    **origin: object,
) -> Found:
    """As :func:`~sparsepipe.planning.search.find_plan`, for what a strategy recomputes.

    Of a synchronous pipeline what its microbatches keep counts, and second runs of layers do so in
    that and in the stages' times. Where layers are to be
    chosen (``recompute=auto``), the search has for each stage the cheapest ones with which it fits.
    The plan tells what is recomputed.

    Args:
        choice: see there.
        spec: see there.
        inventory: see there.
        profiles: see there.
        **origin: see there.

    Raises:
        ConfigError: a setting does not suit the search or the plan, or a stage does not fit.
        SparsePipeError: as there.
    """
    stages = synchronous_stages_of(spec.parallel, profiles)
    automatic = stages is not None and stages.is_automatic
    if automatic and not choice.memory:
        log.warning(
            "recompute=auto goes by the memory of the devices: the search counts it, though its "
            "memory=false asks for none"
        )
    if automatic:
        choice = replace(choice, memory=True)  # which is what the layers are chosen by
    found = find_plan(choice, spec, inventory, profiles, stages, **origin)
    if automatic and found.chosen is not None:
        log_chosen(found.chosen)
    return found


def recomputing(
    plan: Plan, spec: RunSpec, inventory: Inventory, profiles: Mapping[str, Profile]
) -> Plan:
    """A plan that is given, telling what is recomputed.

    Args:
        plan: on devices of the inventory.
        spec: the configuration.
        inventory: the hardware.
        profiles: of its devices, by their names; they count where layers are to be chosen.

    Raises:
        ConfigError: the setting does not suit the plan, or a stage does not fit.
    """
    if not is_automatic(spec.parallel):
        return with_spans(plan, spans_told(plan, spec.parallel))
    chosen = chosen_for(plan, spec, inventory, profiles)
    log_chosen(chosen)
    return with_spans(plan, chosen.spans)


def chosen_for(
    plan: Plan, spec: RunSpec, inventory: Inventory, profiles: Mapping[str, Profile]
) -> Chosen:
    """The cheapest layers to recompute, with what the search counts of memory.

    Raises:
        ConfigError: a stage does not fit.
    """
    memory = memory_model(SearchChoice(**spec.recompute_memory), spec)
    assert memory is not None
    return choose(plan, profiles, inventory, spec.parallel, memory)
