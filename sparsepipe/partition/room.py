"""What to say where no plan fits the memory: by how much, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs import Costs
from sparsepipe.partition.evaluate import fits, plan_bytes
from sparsepipe.partition.lattice import Lattice
from sparsepipe.partition.memory import MIB, REPLICA_BUFFERS, room_bytes
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search import feasible
from sparsepipe.partition.ties import Choice

_SHARES = (2, 4, 8, 16)


def no_room(problem: Problem, lattice: Lattice) -> PlanError:
    """The error for a problem that no plan over a lattice solves.

    Args:
        problem: with limits of memory that rule all plans out.
        lattice: of the devices that stages may have used when they end.
    """
    missing_mib = -(-_missing_bytes(problem, lattice) // MIB)
    would = _what_would(problem, lambda changed: _fits(changed, lattice))
    return PlanError(
        f"no plan fits the memory: the best one lacks {missing_mib:,.0f} MiB on a device",
        remedy=f"use devices with more memory, more devices, or a smaller data.batch_size{would}",
    )


def check_room(plan: Sequence[Choice], problem: Problem) -> None:
    """Refuses a plan that does not fit the devices.

    Args:
        plan: of a search that does not look at them.
        problem: with the devices that there are.

    Raises:
        PlanError: the message says which stage lacks how much, and what would fit.
    """
    fleet, memory = problem.fleet, problem.memory
    if memory is None:
        return
    for number, (kept, room) in enumerate(plan_bytes(plan, problem.spans, fleet, memory)):
        if room is not None and kept > room_bytes(room):
            would = _what_would(
                problem, lambda changed: fits(plan, changed.spans, fleet, changed.memory)
            )
            raise PlanError(
                f"stage {number} keeps {kept / MIB:,.0f} MiB on each device, and its smallest "
                f"holds {room / MIB:,.0f} MiB",
                remedy="use a smaller data.batch_size, or a search that looks at the memory of "
                f"each device: hete_mp or exact{would}",
            )


def _missing_bytes(problem: Problem, lattice: Lattice) -> float:
    """How much more memory each device must have for some plan to fit."""
    memory, spans = problem.memory, problem.spans
    assert memory is not None
    parameter_bytes = float(spans.parameter_bytes_I[-1])
    whole = memory.stage_bytes(
        parameter_bytes,
        spans.stored_bytes(0, spans.num_layers),
        replicas=1,
        left=problem.fleet.num_devices,
    )
    low, high = 0.0, whole + REPLICA_BUFFERS * parameter_bytes  # no stage keeps more
    while high - low > MIB / 2:
        middle = (low + high) / 2
        if _fits(problem, lattice, more_bytes=middle):
            high = middle
        else:
            low = middle
    return high


def _what_would(problem: Problem, fitting: Callable[[Problem], bool]) -> str:
    """What else to do, to be added to a remedy; nothing where no change would do."""
    for words, changed in _changes(problem):
        if fitting(changed):
            alone = "" if len(words) == 1 else " together (none of these alone)"
            return f"; what would fit: {' and '.join(words)}{alone}"
    return ""


def _changes(problem: Problem) -> Iterator[tuple[list[str], Problem]]:
    """Changes that take less memory, in words and done; one alone first, and the mildest first."""
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
    """With so small a share of the batch size, as far as memory goes."""
    spans = problem.spans
    smaller = replace(
        spans,
        stored_bytes_I=spans.stored_bytes_I / share,
        begin_bytes_I=None if spans.begin_bytes_I is None else spans.begin_bytes_I / share,
        end_bytes_I=None if spans.end_bytes_I is None else spans.end_bytes_I / share,
    )
    return replace(problem, spans=smaller)


def _fits(problem: Problem, lattice: Lattice, *, more_bytes: float = 0.0) -> bool:
    costs = Costs(problem.spans, lattice, problem.model, problem.memory, more_bytes=more_bytes)
    return feasible(costs)
