"""Memory of each rank over the time of a simulated run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sparsepipe.partition.memory.model import REPLICA_BUFFERS, MemoryModel
from sparsepipe.schedule import Action, Span
from sparsepipe.simulate.record import Record
from sparsepipe.simulate.simulation import SCHEDULES, Simulation
from sparsepipe.simulate.workload import StageCosts, Workload


@dataclass(frozen=True, slots=True)
class Level:
    """The bytes that are kept from a time on."""

    time_s: float
    num_bytes: float


def memory_over_time(
    record: Record,
    workload: Workload,
    model: MemoryModel,
    *,
    sizes: Sequence[float] | None = None,
) -> list[tuple[Level, ...]]:
    """Bytes that each rank keeps from the beginning on, at each change.

    Weights, gradients, optimizer state and the buffers of replicas stay; a minibatch's stored bytes
    come when its forward begins and go when its backward ends. Where weights are stashed, a version
    that is still in use is copied when an update begins, and goes with the last backward that uses
    it; predicted weights come and go with their minibatch. What is there while a backward runs
    layers once more counts as long as any minibatch is in flight.

    ``sizes`` are those of the microbatches of each minibatch over the workload's; by default 1.

    Returns:
        Of each rank, in the order of time.
    """
    by_rank: list[list[Span]] = [[] for _ in range(record.plan.num_ranks)]
    for span in record.spans:
        by_rank[span.rank].append(span)
    return [_levels(spans, record, workload, model, sizes) for spans in by_rank]


def long_run_peaks_bytes(simulation: Simulation, model: MemoryModel) -> list[float]:
    """The most that each rank keeps at a time in a run that is long enough.

    What a rank keeps follows from the order of its actions, whenever it comes to them.
    """
    plan, splits = simulation.workload.plan, simulation.recipe.splits
    sizes = simulation.sizes
    stages = list(enumerate(simulation.workload.stages))
    if simulation.recipe is SCHEDULES["asynchronous"]:  # which the partitioners' model is of
        return [
            model.stage_bytes(
                costs.parameter_bytes,
                costs.stored_bytes,
                replicas=plan.replicas(stage),
                left=plan.num_ranks - plan.ranks_of(stage).start,
            )
            for stage, costs in stages
            for _ in plan.ranks_of(stage)
        ]
    found: list[float] = []
    for stage, costs in stages:
        ranks = plan.ranks_of(stage)
        peaks = []
        # With parts of minibatches each of these goes like the first, else each round of replicas,
        # which are alike then.
        minibatches = 2 if splits else 2 * len(ranks)
        for rank in ranks if splits else ranks[:1]:
            order = simulation.order(rank, minibatches)
            peaks.append(max(_kept_bytes(order, costs, model, replicas=len(ranks), sizes=sizes)))
        found += peaks if splits else peaks * len(ranks)
    return found


def _levels(
    spans: list[Span],
    record: Record,
    workload: Workload,
    model: MemoryModel,
    sizes: Sequence[float] | None,
) -> tuple[Level, ...]:
    if not spans:
        return ()
    stage = record.plan.stage_of(spans[0].rank)
    kept = _kept_bytes(
        (span.action for span in spans),
        workload.stages[stage],
        model,
        replicas=record.plan.replicas(stage),
        sizes=sizes,
    )
    times_s = (span.end if span.action.kind == "B" else span.start for span in spans)
    return tuple(map(Level, (0.0, *times_s), kept))


def _kept_bytes(
    actions: Iterable[Action],
    costs: StageCosts,
    model: MemoryModel,
    *,
    replicas: int,
    sizes: Sequence[float] | None = None,
) -> Iterator[float]:
    """Bytes that a rank keeps at first; then as each action begins, or a backward ends."""
    buffers = REPLICA_BUFFERS if replicas > 1 else 0.0
    always = 1 + model.optimizer + model.gradients + buffers
    static_bytes = model.reserved_bytes + always * costs.parameter_bytes
    version_bytes = costs.parameter_bytes if model.stash else 0.0
    in_flight: dict[tuple[int, int | None], int] = {}  # versions of the weights, by microbatch
    users: dict[int, int] = {}  # microbatches in flight on each version
    updates = 0
    yield static_bytes
    for action in actions:
        key = action.number, action.microbatch
        if action.kind == "F":
            in_flight[key] = updates
            users[updates] = users.get(updates, 0) + 1
        elif action.kind == "B":
            version = in_flight.pop(key)
            users[version] -= 1
            if not users[version]:
                del users[version]
        else:
            updates += 1
        extra = len(in_flight) if model.predicted else len(users) - (updates in users)
        held = [1.0 if sizes is None or j is None else sizes[j] for _, j in in_flight]
        kept_bytes = sum(held) * costs.stored_bytes + extra * version_bytes
        yield static_bytes + kept_bytes + costs.recomputed_bytes * max(held, default=0.0)
