"""Whether a plan fits its devices, and the error where no plan does."""

from __future__ import annotations

from collections.abc import Sequence

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.activation_checkpointing.selection import MORE_ROOM
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.memory.model import MIB, plan_bytes, room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.checkpointed_stages import recomputation_of

_LOOKING = "a search that looks at the memory of each device: hete_mp or exact"


def no_fit_error(problem: Problem) -> PlanError:
    """An error for a problem that no plan solves, with all that a plan must keep to."""
    if problem.synchronous is None:
        return PlanError(
            "no plan fits the memory of the devices",
            remedy="use devices with more memory, more devices, a smaller data.batch_size, or an "
            "optimizer with less state",
        )
    cut, named = problem.synchronous.microbatches, problem.distinct_stages
    needs = "no plan fits the memory of the devices with a microbatch for each device"
    needs += f" ({cut.count})"
    if cut.least_readers > 1:
        needs += f" and samples for each microbatch ({cut.least_readers} devices that read)"
    if named:
        needs += f" and the stages 0 to {named - 1} that recompute names"
    return PlanError(
        needs, remedy=f"use {MORE_ROOM}; fewer microbatches; or parallel.strategy.recompute=auto"
    )


def kept_and_limit(plan: Sequence[Choice], problem: Problem) -> list[tuple[float, float | None]]:
    """Bytes that each device of each stage keeps, and the limit of the smallest one, if known.

    Raises:
        ConfigError: the plan lacks layers or stages that are to be recomputed.
    """
    assert problem.memory is not None
    each = plan_bytes(plan, problem.spans, problem.pool, problem.memory)
    if problem.synchronous is None:
        return each
    chosen = recomputation_of(plan, problem)
    kept = (a + b for a, b in zip(chosen.beside_bytes, chosen.peaks_bytes, strict=True))
    return list(zip(kept, (room for _, room in each), strict=True))


def check_memory(plan: Sequence[Choice], problem: Problem) -> StageSpans | None:
    """Refuses a plan that does not fit the devices.

    Returns:
        Layers to recompute with which it fits, where memory chooses them; else None.

    Raises:
        PlanError: a stage keeps more than its devices hold.
        ConfigError: layers are to be chosen, and a stage does not fit, whatever is recomputed; or
            the plan lacks layers or stages that are to be recomputed.
    """
    if problem.memory is None:
        return None
    if problem.synchronous is not None and problem.synchronous.is_automatic:
        try:
            return recomputation_of(plan, problem).spans
        except ConfigError as error:
            error.remedy += f"; or {_LOOKING}"
            raise
    for number, (kept, room) in enumerate(kept_and_limit(plan, problem)):
        if room is not None and kept > room_bytes(room):
            raise PlanError(
                f"stage {number} keeps {kept / MIB:,.0f} MiB on each device, and its smallest "
                f"holds {room / MIB:,.0f} MiB",
                remedy=f"use a smaller data.batch_size, or {_LOOKING}",
            )
    return None
