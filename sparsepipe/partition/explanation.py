"""Costs and utilisation of each stage of a plan, and what limits the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsepipe.cluster.places import device_name
from sparsepipe.errors import PlanError
from sparsepipe.partition.activation_checkpointing.selection import RecomputedLayers
from sparsepipe.partition.activation_checkpointing.setting import StageSpans, bounds_of
from sparsepipe.partition.costs.layers import loads_s
from sparsepipe.partition.costs.model import EQUAL, CostModel, plan_times
from sparsepipe.partition.devices import Choice, DevicePool, devices_text
from sparsepipe.partition.memory import plan_bytes
from sparsepipe.partition.problem import Problem, Solution
from sparsepipe.partition.search.algorithms import dp
from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import Stage

_ALL_PLANS = ("exact", "exhaustive")
"""Searches that consider all plans, so that no plan is better than theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """Costs of stage ``stage``, layers ``first`` to ``last`` inclusive; seconds are per minibatch.

    Attributes:
        devices: the stage's devices as text, such as ``4 x RTX 2080 Ti``.
        compute_s: forward, backward, update, loading and recomputation on its slowest device,
            divided by its number of replicas.
        sync_s: all-reduce between the replicas.
        transfer_s: transfer to the next stage; 0 for the last.
        memory_bytes: bytes that each of its devices keeps; None: the search ignores memory.
        memory_limit_bytes: the least memory of one of its devices; None: unknown or ignored.
        utilisation: share of the time between minibatches in which it computes or all-reduces.
    """

    stage: int
    first: int
    last: int
    devices: str
    compute_s: float
    sync_s: float
    transfer_s: float
    memory_bytes: float | None
    memory_limit_bytes: float | None
    utilisation: float

    @property
    def time_s(self) -> float:
        """Q, the seconds of compute and all-reduce together."""
        return self.compute_s + self.sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A solution with its costs, for tables, plan files and messages.

    Attributes:
        bottleneck_s: seconds between two minibatches: those of the slowest stage or transfer.
        limit: the name of that stage or transfer, such as ``stage 0``.
        dp_s: seconds between two minibatches with data parallelism on the same devices, by the same
            cost model, without microbatches; None: it does not fit the memory.
        nodes: names of each stage's nodes in a branching graph, whose states count as layers; else
            empty.
        spans: recomputed spans of each stage; None: the pipeline is asynchronous.
    """

    solution: Solution
    rows: tuple[StageRow, ...]
    bottleneck_s: float
    limit: str
    dp_s: float | None
    nodes: tuple[tuple[str, ...], ...] = ()
    spans: StageSpans | None = None

    @property
    def is_dp(self) -> bool:
        """Whether the plan is data parallelism: one stage on all devices."""
        return len(self.rows) == 1

    def verdict(self) -> str:
        """A clause that says how fast the plan is compared with data parallelism."""
        if self.dp_s is None:
            alone = "one stage on all devices, in microbatches: whole batches would not fit"
            return (
                alone if self.is_dp else "data parallelism does not fit the memory of these devices"
            )
        if self.is_dp:
            if self.solution.strategy == "dp":
                return "this is data parallelism"
            among = "" if self.solution.strategy in _ALL_PLANS else " that this search looks at"
            return f"data parallelism is the best plan{among}: splitting would gain nothing"
        if not self.bottleneck_s:
            return "by these profiles the plan takes no time"
        ratio = self.dp_s / self.bottleneck_s
        gain = f"{ratio:.2f}x as fast as data parallelism ({1e3 * self.dp_s:.1f} ms)"
        if ratio < 1 - EQUAL:
            gain = f"data parallelism is the better plan: {1 / ratio:.2f}x as fast as this one"
        counted = "sums follow the backward and no device waits for another"
        return f"{gain}, if {counted}: task=simulate lets sums overlap and counts waiting"


def explain(
    problem: Problem, solution: Solution, chosen: RecomputedLayers | None = None
) -> Explanation:
    """Costs of a solution on the real devices, including the recomputed layers ``chosen``."""
    pool, spans, plan = problem.pool, problem.spans, solution.stages
    stages_s, cuts_s = plan_times(plan, spans, pool, problem.model, by_hosts=solution.by_hosts)
    kept = None if problem.memory is None else plan_bytes(plan, spans, pool, problem.memory)
    if chosen is not None:
        counts = (sum(stage.counts) for stage in plan)
        more_s = [time_s / count for time_s, count in zip(chosen.times_s, counts, strict=True)]
        stages_s = [a + b for a, b in zip(stages_s, more_s, strict=True)]
        held = [a + b for a, b in zip(chosen.beside_bytes, chosen.peaks_bytes, strict=True)]
        kept = kept and [(own, room) for own, (_, room) in zip(held, kept, strict=True)]
    bottleneck_s = max(stages_s + cuts_s)
    rows = []
    for number, (stage, time_s) in enumerate(zip(plan, stages_s, strict=True)):
        replicas = sum(stage.counts)
        sync_s = problem.model.sync_s(
            spans.parameter_bytes(stage.first, stage.end),
            replicas=replicas,
            bytes_per_s=pool.sync_bytes_per_s(stage.counts),
        )
        memory_bytes, limit_bytes = kept[number] if kept else (None, None)
        rows.append(
            StageRow(
                stage=number,
                first=stage.first,
                last=stage.end - 1,
                devices=devices_text(stage.counts, pool.kinds),
                compute_s=time_s - sync_s,
                sync_s=sync_s,
                transfer_s=cuts_s[number] if number < len(cuts_s) else 0.0,
                memory_bytes=memory_bytes,
                memory_limit_bytes=limit_bytes,
                utilisation=time_s / bottleneck_s if bottleneck_s else 1.0,
            )
        )
    limit = f"stage {stages_s.index(max(stages_s))}"
    if cuts_s and max(cuts_s) > max(stages_s):
        number = cuts_s.index(max(cuts_s))
        limit = f"transfer from stage {number} to stage {number + 1}"
    dp_s = None
    with suppress(PlanError):  # without microbatches and recomputation
        alone = dp(replace(problem, synchronous=None)).stages
        dp_s = plan_times(alone, spans, pool, problem.model)[0][0]
    return Explanation(
        solution=solution,
        rows=tuple(rows),
        bottleneck_s=bottleneck_s,
        limit=limit,
        dp_s=dp_s,
        spans=None if chosen is None else chosen.spans,
        nodes=stage_nodes(problem, plan),
    )


def stage_nodes(problem: Problem, stages: Sequence[Choice]) -> tuple[tuple[str, ...], ...]:
    """The names of the nodes in each stage of a branching graph; empty for a chain of layers."""
    if not problem.profiles or not (states := problem.profiles[0].states):
        return ()
    names = [layer.name for layer in problem.profiles[0].layers]
    done = [0, *(state.layers for state in states)]
    held = [done[stage.end] & ~done[stage.first] for stage in stages]
    return tuple(tuple(name for n, name in enumerate(names) if bits >> n & 1) for bits in held)


def as_plan(problem: Problem, explanation: Explanation, **origin: object) -> Plan:
    """The explained solution as a Plan with details, with devices named ``host/model/number``.

    ``origin``: further entries of the plan's details, about the inputs of the search.
    """
    solution = explanation.solution
    recomputed = bounds_of(explanation.spans or ())
    kind = type(problem.model)
    path = {} if kind is CostModel else {"class": f"{kind.__module__}.{kind.__qualname__}"}
    details = {
        "strategy": solution.strategy,
        "cost_model": {**asdict(problem.model), **path},
        "order": solution.order,
        "bottleneck_s": explanation.bottleneck_s,
        "bottleneck": explanation.limit,
        "dp_s": explanation.dp_s,
        **({} if solution.expected_s is None else {"search_expects_s": solution.expected_s}),
        "stage_times_s": [row.time_s for row in explanation.rows],
        "rank_times_s": _rank_times(problem, explanation),
        "transfer_times_s": [row.transfer_s for row in explanation.rows[:-1]],
        "memory_bytes": [row.memory_bytes for row in explanation.rows],
        **({"states": True, "stage_nodes": explanation.nodes} if explanation.nodes else {}),
        **({"recomputed": recomputed} if recomputed else {}),
        **origin,
    }
    names = device_names(solution.stages, problem.pool)
    stages = tuple(
        Stage(layers=(stage.first, stage.end - 1), devices=devices)
        for stage, devices in zip(solution.stages, names, strict=True)
    )
    return Plan(stages=stages, details=details)


def _rank_times(problem: Problem, explanation: Explanation) -> list[dict[str, object]]:
    """The entries of :func:`rank_times`; empty for a branching graph and without profiles."""
    pool, profiles = problem.pool, problem.profiles
    if not profiles or profiles[0].states:
        return []
    updates = all(profile.update_s is not None for profile in profiles)
    found: list[dict[str, object]] = []
    kinds = list(zip(pool.kinds, profiles, loads_s(profiles), strict=True))
    for number, stage in enumerate(explanation.solution.stages):
        spans = explanation.spans[number] if explanation.spans else ()
        again = {layer for span in spans for layer in span}
        for (kind, profile, load_s), count in zip(kinds, stage.counts, strict=True):
            layers = profile.layers[stage.first : stage.end]
            recomputed_s = sum(layer.forward_s for layer in layers if layer.index in again)
            times_s: dict[str, object] = {
                "device": kind.name,
                "forward": sum(layer.forward_s for layer in layers),
                "backward": sum(layer.backward_s for layer in layers) + recomputed_s,
                "update": sum(layer.update_s or 0.0 for layer in layers) * updates,
                **({"load": load_s} if load_s and number == 0 else {}),
            }
            found += [times_s] * count
    return found


def rank_times(plan: Plan) -> list[dict[str, Any]]:
    """The times that a plan's search predicted for each rank: its ``device``, and seconds of a
    minibatch's ``forward``, ``backward``, ``update`` and, if it counts, ``load``.

    Empty if the plan has no such times, or if they are for devices other than its own.
    """
    expected: list[dict[str, Any]] = plan.details.get("rank_times_s") or []
    devices = [device_name(device) for stage in plan.stages for device in stage.devices]
    return expected if [each["device"] for each in expected] == devices else []


def device_names(stages: Sequence[Choice], pool: DevicePool) -> list[tuple[str, ...]]:
    """Names ``host/model/number`` of each stage's devices; each kind is numbered in stage order."""
    taken = [0] * len(pool.kinds)
    found = []
    for stage in stages:
        names: list[str] = []
        for k, (kind, count) in enumerate(zip(pool.kinds, stage.counts, strict=True)):
            names += [f"{kind.host}/{kind.name}/{taken[k] + n}" for n in range(count)]
            taken[k] += count
        found.append(tuple(names))
    return found
