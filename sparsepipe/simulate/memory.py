"""Memory of each rank over the time of a simulated run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sparsepipe.partition.memory import MemoryModel
from sparsepipe.schedule import Action, Span
from sparsepipe.simulate.engine import Record
from sparsepipe.simulate.simulation import SCHEDULES, Simulation
from sparsepipe.simulate.workload import StageCosts, Workload


@dataclass(frozen=True, slots=True)
class Level:
    """The bytes that a rank holds from ``time_s`` until its next level."""

    time_s: float
    num_bytes: float


def memory_over_time(
    record: Record, workload: Workload, model: MemoryModel, *, sizes: Sequence[float] | None = None
) -> list[tuple[Level, ...]]:
    """Returns, for each rank, the bytes that it holds over time, with a level for each change.

    Weights, gradients, optimizer state and the buffers for summing gradients over replicas count
    throughout; a minibatch's stored bytes, from its forward to its backward. A version of the
    weights that is still in use is copied when an update begins, and freed after its last backward;
    predicted weights and recomputed bytes count as long as their minibatches are in flight.
    ``sizes``: sizes of microbatches relative to those of ``workload``; None: 1 for all.
    """
    plan = record.plan
    by_rank: list[list[Span]] = [[] for _ in range(plan.num_ranks)]
    for span in record.spans:
        by_rank[span.rank].append(span)
    found: list[tuple[Level, ...]] = []
    for rank, spans in enumerate(by_rank):
        stage = plan.stage_of(rank)
        actions = (span.action for span in spans)
        costs, replicas = workload.stages[stage], plan.replicas(stage)
        kept = _kept_bytes(actions, costs, model, replicas=replicas, sizes=sizes)
        times_s = (span.end if span.kind == "B" else span.start for span in spans)
        found.append(tuple(map(Level, (0.0, *times_s), kept)) if spans else ())
    return found


def long_run_peaks_bytes(simulation: Simulation, model: MemoryModel) -> list[float]:
    """The peak memory in bytes of each rank in a long run, from the order of its actions."""
    plan, splits = simulation.workload.plan, simulation.recipe.splits
    found: list[float] = []
    for stage, costs in enumerate(simulation.workload.stages):
        ranks, replicas = plan.ranks_of(stage), plan.replicas(stage)
        if simulation.recipe is SCHEDULES["asynchronous"]:  # as in the partitioners' model
            left = plan.num_ranks - ranks.start
            size = costs.parameter_bytes, costs.stored_bytes
            peaks = [model.stage_bytes(*size, replicas=replicas, left=left)]
        else:
            # Minibatches that are split, and rounds of replicas, all use as much.
            minibatches = 2 if splits else 2 * replicas
            orders = (simulation.order(rank, minibatches) for rank in ranks)
            peaks = [
                max(_kept_bytes(own, costs, model, replicas=replicas, sizes=simulation.sizes))
                for own in (orders if splits else [next(orders)])
            ]
        found += peaks if len(peaks) == replicas else peaks * replicas
    return found


def _kept_bytes(
    actions: Iterable[Action],
    costs: StageCosts,
    model: MemoryModel,
    *,
    replicas: int,
    sizes: Sequence[float] | None,
) -> Iterator[float]:
    """Yields the bytes held at first, as each forward or update begins and each backward ends."""
    one = replace(model, stash=False)  # the newest version only
    static_bytes = one.beside_bytes(costs.parameter_bytes, replicas=replicas)
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
