"""What each rank keeps in memory over the time of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.partition.memory import REPLICA_BUFFERS, MemoryModel
from sparsepipe.schedule import Span
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.workload import Workload


@dataclass(frozen=True, slots=True)
class Level:
    """From a time on.

    Attributes:
        time_s: when.
        num_bytes: that are kept.
    """

    time_s: float
    num_bytes: float


def memory_over_time(
    record: Record, workload: Workload, model: MemoryModel
) -> list[tuple[Level, ...]]:
    """What each rank keeps, from the beginning on, whenever that changes.

    Weights, gradients, optimizer state and the buffers of replicas stay; a minibatch's stored
    bytes come when its forward begins and go when its backward ends. Where weights are stashed, a
    version that is still in use is copied when an update begins, and goes with the last backward
    that uses it; predicted weights come and go with their minibatch.

    Args:
        record: with its spans.
        workload: that was run.
        model: what counts.

    Returns:
        Of each rank, in the order of time.
    """
    by_rank: list[list[Span]] = [[] for _ in range(record.plan.num_ranks)]
    for span in record.spans:
        by_rank[span.rank].append(span)
    return [_levels(spans, record, workload, model) for spans in by_rank]


def peak_bytes(levels: Sequence[Level]) -> float:
    """The most at a time; 0 of a rank that did nothing."""
    return max((level.num_bytes for level in levels), default=0.0)


def _levels(
    spans: list[Span], record: Record, workload: Workload, model: MemoryModel
) -> tuple[Level, ...]:
    if not spans:
        return ()
    stage = record.plan.stage_of(spans[0].rank)
    costs = workload.stages[stage]
    buffers = REPLICA_BUFFERS if record.plan.replicas(stage) > 1 else 0.0
    always = 1 + model.optimizer + model.gradients + buffers
    static_bytes = model.reserved_bytes + always * costs.parameter_bytes
    flying: dict[tuple[int, int | None], int] = {}  # version of the weights, by part
    updates = 0

    def now_bytes() -> float:
        old = {version for version in flying.values() if version != updates}
        extra = len(flying) if model.predicted else len(old)
        stashed = extra * costs.parameter_bytes if model.stash else 0.0
        return static_bytes + len(flying) * costs.stored_bytes + stashed

    levels = [Level(0.0, now_bytes())]
    for span in spans:
        key = span.action.number, span.action.microbatch
        if span.action.kind == "F":
            flying[key] = updates
        elif span.action.kind == "B":
            del flying[key]
        else:
            updates += 1
        levels.append(Level(span.end if span.action.kind == "B" else span.start, now_bytes()))
    return tuple(levels)
