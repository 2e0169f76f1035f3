"""Errors for problems that no plan solves: how much memory is missing, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.activation_checkpointing.selection import MORE_ROOM
from sparsepipe.partition.activation_checkpointing.setting import StageSpans
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.memory.microbatches import Microbatches
from sparsepipe.partition.memory.model import MIB, REPLICA_BUFFERS, plan_bytes, room_bytes
from sparsepipe.partition.problem import Problem, SynchronousStages
from sparsepipe.partition.search.bisection import feasible
from sparsepipe.partition.search.checkpointed_stages import (
    LayerTables,
    RecomputationCosts,
    recomputation_of,
)
from sparsepipe.partition.search.lattice import Lattice
from sparsepipe.partition.search.stage_costs import (
    Costs,
    costs_by_readers,
)

_SHARES = (2, 4, 8, 16)

_LOOKING = "a search that looks at the memory of each device: hete_mp or exact"


def no_fit_error(problem: Problem, lattice: Lattice) -> PlanError:
    """The error for a problem that no plan over a lattice solves."""
    tables = None if problem.synchronous is None else LayerTables(problem)
    if problem.synchronous is not None:
        if not any_fits(problem, lattice, more_bytes=float("inf"), tables=tables):
            return _no_such_plan(problem, problem.synchronous, lattice)
        if problem.synchronous.is_automatic:
            return PlanError(
                "no plan fits the memory, whatever layers its stages recompute",
                remedy=f"use {MORE_ROOM}",
            )
    missing_mib = -(-_missing_bytes(problem, lattice, tables) // MIB)
    would = _what_would(problem, lambda changed: any_fits(changed, lattice, tables=tables))
    return PlanError(
        f"no plan fits the memory: the best one lacks {missing_mib:,.0f} MiB on a device",
        remedy=f"use devices with more memory, more devices, or a smaller data.batch_size{would}"
        + ("" if problem.synchronous is None else "; or parallel.strategy.recompute=auto"),
    )


def _no_such_plan(problem: Problem, synchronous: SynchronousStages, lattice: Lattice) -> PlanError:
    """The error where not even devices without memory limits would help."""
    devices, few = problem.pool.num_devices, synchronous.microbatches.count

    def is_one_with(cut: Microbatches) -> bool:
        changed = replace(problem, synchronous=replace(synchronous, microbatches=cut))
        return any_fits(changed, lattice, more_bytes=float("inf"))

    filled = replace(synchronous.microbatches, batch_size=None)
    if synchronous.microbatches.least_readers > 1 and is_one_with(filled):
        return _too_few_samples(synchronous, lattice)
    if few < devices and is_one_with(replace(filled, count=devices)):
        return PlanError(
            f"all plans that are looked at have a stage of more devices than there are "
            f"microbatches ({few}), at which they take turns",
            remedy="set parallel.strategy.microbatches to as many or more, or use a search that "
            "gives a stage fewer devices: hete_mp or exact",
        )
    return PlanError(
        f"no plan that is looked at has the stages 0 to {problem.distinct_stages - 1}, of which "
        "layers are to be recomputed, and in none of those that are named a layer that is "
        "named by itself",
        remedy="name layers in place of stages, or set parallel.strategy.recompute=auto",
    )


def _too_few_samples(synchronous: SynchronousStages, lattice: Lattice) -> PlanError:
    """The error where every plan would leave some microbatches empty in every step."""
    cut = synchronous.microbatches
    assert cut.batch_size is not None
    firsts = (ways.replicas_E[ways.sources_E == 0].max(initial=0) for ways in lattice.ways)
    most = max(1, int(max(firsts)) - max(0, synchronous.distinct_stages - 1))
    parts = cut.batch_size * min(most, cut.least_readers - 1)
    return PlanError(
        f"{cut.count} microbatches need {cut.least_readers} devices of the first stage, each of "
        f"which reads {cut.batch_size} samples, and no plan that is looked at has as many: some "
        "would be empty in every step",
        remedy=f"set parallel.strategy.microbatches to {parts} or fewer, take a larger "
        "data.batch_size, or use a search that may give the first stage more devices: hete_mp or "
        "exact",
    )


def kept_and_limit(plan: Sequence[Choice], problem: Problem) -> list[tuple[float, float | None]]:
    """Bytes that each device of each stage keeps, and the limit of the smallest one, if known.

    Raises:
        ConfigError: the plan lacks layers or stages that are to be recomputed.
    """
    assert problem.memory is not None
    if problem.synchronous is None:
        return plan_bytes(plan, problem.spans, problem.pool, problem.memory)
    chosen = recomputation_of(plan, problem)
    rooms = (room for _, room in plan_bytes(plan, problem.spans, problem.pool, problem.memory))
    kept = (a + b for a, b in zip(chosen.beside_bytes, chosen.peaks_bytes, strict=True))
    return list(zip(kept, rooms, strict=True))


def check_memory(plan: Sequence[Choice], problem: Problem) -> StageSpans | None:
    """Refuses a plan that does not fit the devices.

    Returns:
        Layers to recompute with which it fits, where memory chooses them; else None.

    Raises:
        PlanError: the message says which stage lacks how much, and what would fit.
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
            would = _what_would(problem, lambda changed: _fits(plan, changed))
            raise PlanError(
                f"stage {number} keeps {kept / MIB:,.0f} MiB on each device, and its smallest "
                f"holds {room / MIB:,.0f} MiB",
                remedy=f"use a smaller data.batch_size, or {_LOOKING}{would}",
            )
    return None


def _missing_bytes(problem: Problem, lattice: Lattice, tables: LayerTables | None) -> float:
    """How much more memory each device must have for some plan to fit."""
    memory, spans = problem.memory, problem.spans
    assert memory is not None
    parameter_bytes = float(spans.parameter_bytes_I[-1])
    whole = memory.stage_bytes(
        parameter_bytes,
        spans.stored_bytes(0, spans.num_layers),
        replicas=1,
        left=problem.pool.num_devices,
    )
    low, high = 0.0, max(MIB, whole + REPLICA_BUFFERS * parameter_bytes)

    def fits(more_bytes: float) -> bool:
        return any_fits(problem, lattice, more_bytes=more_bytes, tables=tables)

    assert fits(float("inf")), "a problem that some plan solves, but for the memory"
    # What stages keep beside all layers' own: inputs of spans, and outputs that no layer saves.
    while not fits(high):
        high *= 2
    while high - low > MIB / 2:
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _what_would(problem: Problem, fitting: Callable[[Problem], bool]) -> str:
    """The end of a remedy: changes with which a plan fits; empty where none of them helps."""
    for words, changed in _changes(problem):
        if fitting(changed):
            alone = "" if len(words) == 1 else " together (none of these alone)"
            return f"; what would fit: {' and '.join(words)}{alone}"
    return ""


def _changes(problem: Problem) -> Iterator[tuple[list[str], Problem]]:
    """Problems that take less memory, with a description of the change; single changes first."""
    memory = problem.memory
    assert memory is not None
    found = []
    for stashed, state, share in product((True, False), (True, False), (1, *_SHARES)):
        words = [f"1/{share} of the batch size"] if share > 1 else []
        if not state and memory.optimizer:
            words.append("an optimizer without state")
        if not stashed and memory.stash:
            words.append("weights that are not stashed")
        if len(words) == (share > 1) + (not state) + (not stashed) > 0:
            found.append((words, share, state, stashed))
    for words, share, state, stashed in sorted(found, key=lambda entry: len(entry[0])):
        lighter = replace(
            memory,
            optimizer=memory.optimizer if state else 0.0,
            stash=memory.stash and stashed,
        )
        yield words, replace(_with_batch(problem, share), memory=lighter)


def _with_batch(problem: Problem, share: int) -> Problem:
    """The problem with one ``share``-th of the batch size, as far as memory goes."""
    spans = problem.spans
    smaller = replace(
        spans,
        stored_bytes_I=spans.stored_bytes_I / share,
        begin_bytes_I=None if spans.begin_bytes_I is None else spans.begin_bytes_I / share,
        end_bytes_I=None if spans.end_bytes_I is None else spans.end_bytes_I / share,
    )
    synchronous = problem.synchronous
    fewer = None if synchronous is None else synchronous.with_batch(share)
    return replace(problem, spans=smaller, synchronous=fewer)


def _fits(plan: Sequence[Choice], problem: Problem) -> bool:
    return all(
        room is None or kept <= room_bytes(room) for kept, room in kept_and_limit(plan, problem)
    )


def any_fits(
    problem: Problem,
    lattice: Lattice,
    *,
    more_bytes: float = 0.0,
    tables: LayerTables | None = None,
) -> bool:
    """Whether any plan fits the memory if each device holds ``more_bytes`` beyond its limit.

    ``tables`` of a problem with the same layers are reused.
    """
    if problem.synchronous is not None:
        own = LayerTables(problem) if tables is None else tables.of(problem)
        runs = RecomputationCosts(own, problem.memory, more_bytes=more_bytes)
        return any(map(feasible, costs_by_readers(problem, lattice, runs)))
    memory, model = problem.memory, problem.model
    return feasible(Costs(problem.spans, lattice, model, memory, more_bytes=more_bytes))
