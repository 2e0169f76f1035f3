"""What to say where no plan fits the memory: by how much, and what would fit."""

from __future__ import annotations

from dataclasses import replace

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs import Costs
from sparsepipe.partition.lattice import Lattice
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search import feasible

_MIB = 2**20


def no_room(problem: Problem, lattice: Lattice) -> PlanError:
    """The error for a problem that no plan over a lattice solves.

    Args:
        problem: with limits of memory that rule all plans out.
        lattice: of the devices that stages may have used when they end.
    """
    assert problem.memory is not None
    missing_mib = -(-_missing_bytes(problem, lattice) // _MIB)
    remedies = [text for text, changed in _changes(problem) if _fits(changed, lattice)]
    would = f"; what would fit: {remedies[0]}" if remedies else ""
    return PlanError(
        f"no plan fits the memory: the best one lacks {missing_mib:,.0f} MiB on a device",
        remedy=f"use devices with more memory, more devices, or a smaller data.batch_size{would}",
    )


def _missing_bytes(problem: Problem, lattice: Lattice) -> float:
    """How much more memory each device must have for some plan to fit."""
    memory = problem.memory
    assert memory is not None
    spans = problem.spans
    whole = memory.stage_bytes(
        float(spans.parameter_bytes_I[-1]),
        spans.stored_bytes(0, spans.num_layers),
        replicas=1,
        left=problem.fleet.num_devices,
    )
    low, high = 0.0, whole
    while high - low > _MIB / 2:
        middle = (low + high) / 2
        if _fits(problem, lattice, more_bytes=middle):
            high = middle
        else:
            low = middle
    return high


def _changes(problem: Problem) -> list[tuple[str, Problem]]:
    """Changes that take less memory, in words and done; the mildest first."""
    memory, spans = problem.memory, problem.spans
    assert memory is not None
    found = []
    for share in (2, 4, 8, 16):
        smaller = replace(
            spans,
            stored_bytes_I=spans.stored_bytes_I / share,
            begin_bytes_I=None if spans.begin_bytes_I is None else spans.begin_bytes_I / share,
            end_bytes_I=None if spans.end_bytes_I is None else spans.end_bytes_I / share,
        )
        found.append((f"1/{share} of the batch size", replace(problem, spans=smaller)))
    if memory.optimizer:
        found.append(("an optimizer without state", _with_memory(problem, optimizer=0.0)))
    if memory.stash:
        found.append(("weights that are not stashed", _with_memory(problem, stash=False)))
    return found


def _with_memory(problem: Problem, **changes: float) -> Problem:
    assert problem.memory is not None
    memory: MemoryModel = replace(problem.memory, **changes)  # type: ignore[arg-type]
    return replace(problem, memory=memory)


def _fits(problem: Problem, lattice: Lattice, *, more_bytes: float = 0.0) -> bool:
    costs = Costs(problem.spans, lattice, problem.model, problem.memory, more_bytes=more_bytes)
    return feasible(costs)
