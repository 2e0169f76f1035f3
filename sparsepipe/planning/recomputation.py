"""The layers that a synchronous pipeline recomputes: ``parallel.strategy.recompute``.

``auto`` is replaced, before ranks start, by layers with which the stages fit the devices' memory;
the run's plan file then lists them as ``recomputed``. A run with a given plan file recomputes the
layers that the file lists.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Parallel, PlanChoice
from sparsepipe.errors import ConfigError
from sparsepipe.partition.activation_checkpointing.selection import RecomputedLayers
from sparsepipe.partition.activation_checkpointing.setting import (
    Setting,
    StageSpans,
    check_setting,
    in_words,
    recomputed_spans,
    spans_in_plan,
)
from sparsepipe.partition.memory import MIB, Microbatches
from sparsepipe.partition.problem import SynchronousStages
from sparsepipe.planning.division import Division
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan

log = logging.getLogger(__name__)


def recompute_of(parallel: Parallel, division: Division | None) -> Setting:
    """The value of ``recompute`` that is passed to the strategy.

    In a synchronous pipeline, the layers that a plan file recomputes replace ``auto`` and ``none``.
    """
    setting = parallel.recompute
    if division is None or parallel.synchronous is None or setting not in ("auto", "none"):
        return setting
    bounds = division.details.get("recomputed")
    return {"layers": bounds} if bounds else "none"


def refuse_recompute(spec: RunSpec, inventory: Inventory, division: Division | None) -> None:
    """Raises a ConfigError if ``recompute`` cannot work, before the run prepares anything."""
    parallel = spec.parallel
    check_setting(parallel.recompute)
    _refuse_plan_file(parallel, division)
    if parallel.recompute != "auto":
        return
    plan, search = parallel.plan or PlanChoice(), parallel.search
    by_hand = plan.file is not None or plan.cuts is not None
    by_hand = by_hand or "-" not in str(plan.config or "-")  # a single stage
    searched = (search and search.search) or spec.task.get("search")  # of task=partition
    if not by_hand and searched is None:
        raise ConfigError(
            "parallel.strategy.recompute=auto needs the stages before training, but neither a "
            "search nor parallel.plan gives them",
            remedy="set parallel.search.search=hete_mp, which measures the devices if they have "
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
            f"parallel.strategy.recompute=auto needs the memory of the devices, but that of "
            f"{', '.join(dict.fromkeys(unknown))} is unknown",
            remedy="give memory_bytes of each device in the hardware inventory, or name the layers "
            "to recompute",
        )


def _refuse_plan_file(parallel: Parallel, division: Division | None) -> None:
    """Refuses a plan file that recomputes layers which the strategy does not."""
    if division is None or not division.details.get("recomputed"):
        return
    if parallel.synchronous is None:
        raise ConfigError(
            f"{division.file} recomputes layers, but only synchronous pipelines can do that",
            remedy="choose parallel=gpipe, sync_1f1b or eager_1f1b, or give only the plan's "
            "stages, as parallel.plan.config and parallel.plan.cuts",
        )
    assert division.config is not None
    assert division.num_layers is not None
    plan = Plan.of(
        config=division.config,
        cuts=division.cuts or (),
        num_layers=division.num_layers,
        grids=division.grids,
    )
    if parallel.recompute != "auto":
        given_spans(replace(plan, details=division.details), parallel)


def synchronous_stages_of(
    parallel: Parallel, profiles: Mapping[str, Profile]
) -> SynchronousStages | None:
    """Recomputation and microbatches for a plan's search; None for an asynchronous pipeline."""
    if (synchronous := parallel.synchronous) is None:
        return None
    given = (profile.meta.get("batch_size") for profile in profiles.values())
    microbatches = Microbatches(
        schedule=synchronous.schedule,
        count=synchronous.microbatches,
        batch_size=max((int(size) for size in given if size is not None), default=None),
    )
    return SynchronousStages(setting=parallel.recompute, microbatches=microbatches)


def given_spans(plan: Plan, parallel: Parallel) -> StageSpans:
    """The spans of layers that each stage recomputes: those of ``parallel.recompute`` or, if it is
    ``none``, those that the plan's file names.
    """
    setting, own = parallel.recompute, spans_in_plan(plan)
    if setting == "none" and parallel.synchronous is not None:
        return own
    named = recomputed_spans(setting, plan)
    if any(named) and any(own) and named != own:
        raise ConfigError(
            f"parallel.strategy.recompute selects other layers ({in_words(named)}) than the plan "
            f"file recomputes ({in_words(own)})",
            remedy="leave out parallel.strategy.recompute to recompute those of the file, set it "
            "to auto to choose layers anew, or give the stages as parallel.plan.config and "
            "parallel.plan.cuts",
        )
    return named


def log_chosen(chosen: RecomputedLayers) -> None:
    """Logs which layers each stage recomputes."""
    if not any(chosen.spans):
        log.info("all stages fit their devices without recomputing activations")
        return
    for number, spans in enumerate(chosen.spans):
        if spans:
            log.info(
                "stage %d recomputes layers %s: %.3g ms more for a batch, %.1f MiB of activations "
                "of the %.1f MiB available",
                number,
                in_words((spans,)),
                1e3 * chosen.times_s[number],
                chosen.peaks_bytes[number] / MIB,
                chosen.rooms_bytes[number] / MIB,
            )
