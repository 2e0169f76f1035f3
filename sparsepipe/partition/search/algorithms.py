"""The searches by name, each of which returns the best plan of a kind for a problem.

========== ====================================================================================
``dp``      one stage: data parallelism over all devices
``mp``      PipeDream: all devices count as equal, with the profile of a named one
``variance`` Zhang and Sun: each device is a stage, with the least variance of the stages' costs;
            all devices count as equal
``straight`` each device is a stage, and the slowest stage is as fast as possible
``hete_mp`` SparsePipe (Algorithms 1 and 2): stages take devices from a list sorted by kind
``exact``   any devices for each stage
``exhaustive`` the same by trying all plans
========== ====================================================================================

All but ``exhaustive`` and ``variance`` are one search (:mod:`~.bisection`) over different lattices
of devices. With one bandwidth between all devices ``exact`` is optimal over all contiguous splits
and all subsets of devices; with a bandwidth for each link it is optimal if a stage's all-reduce
runs at the speed of its slowest link, and a transfer between stages that are not on one host at
that of the link between hosts. ``mp`` and ``hete_mp`` are optimal in the same sense among their
plans. Times and memory include recomputed layers; with ``recompute=auto``, the chosen layers may
take a few percent more of a stage's time than the best ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.costs.layers import Spans
from sparsepipe.partition.devices import Choice, Counts, DevicePool
from sparsepipe.partition.problem import (
    Problem,
    Solution,
    as_uniform,
    assign_devices,
    assign_in_order,
    equal_kinds,
    merged,
)
from sparsepipe.partition.search.baselines import least_variance
from sparsepipe.partition.search.bisection import best_plan
from sparsepipe.partition.search.checkpointed_stages import (
    RecomputationCosts,
    check_memory,
    no_fit_error,
)
from sparsepipe.partition.search.exhaustive import exhaustive as all_plans
from sparsepipe.partition.search.lattice import Lattice, prefixes, stages_between_subsets, subsets
from sparsepipe.utils.extensions import by_name

Order = str | Sequence[str]


def dp(problem: Problem) -> Solution:
    """The plan of one stage on all devices, with which Algorithm 2 begins."""
    pool = problem.pool
    return _over(problem, [(0,) * len(pool.kinds), pool.counts], strategy="dp")


def mp(problem: Problem, *, device: str) -> Solution:
    """PipeDream's optimizer: all devices count as ``device``, and all links as the slowest.

    Stages take the real devices in the inventory's order.
    """
    alike = as_uniform(problem, device)
    stages = _over(alike, prefixes(alike.pool, [0]), strategy="mp").stages
    taken = assign_in_order(stages, problem.pool, range(len(problem.pool.kinds)))
    spans = check_memory(taken, problem)
    return Solution(stages=tuple(taken), strategy="mp", assumed=alike, spans=spans)


def variance(problem: Problem, *, device: str) -> Solution:
    """Zhang and Sun's heuristic: a stage for each device, with the least variance of their costs.

    All devices count as ``device``; stages take the real ones in the inventory's order. Transfers
    do not count, nor does recomputation.
    """
    alike = as_uniform(problem, device)
    (kind,) = alike.pool.kinds
    spans, number = alike.spans, kind.count
    ends = None
    if problem.synchronous is None:
        room = kind.memory_bytes
        ends = least_variance(spans, stages=number, memory=alike.memory, room=room)
    elif problem.synchronous.microbatches.least_readers == 1:  # else a device reads too few samples
        ends = least_variance(spans, stages=number)
    if ends is None and least_variance(spans, stages=number) is None:
        raise _too_few_layers(spans, number, "variance")
    if ends is None:
        raise no_fit_error(alike)
    stages = [Choice(first=first, end=end, counts=(1,)) for first, end in pairwise([0, *ends])]
    taken = assign_in_order(stages, problem.pool, range(len(problem.pool.kinds)))
    again = check_memory(taken, problem)
    return Solution(stages=tuple(taken), strategy="variance", assumed=alike, spans=again)


def straight(problem: Problem) -> Solution:
    """The best plan with a stage for each device, in the inventory's order.

    It is the option ``straight_pipeline`` of PipeDream's optimizer.
    """
    kinds = range(len(problem.pool.kinds))
    each = [kind for kind in kinds for _ in range(problem.pool.counts[kind])]
    alone = [tuple(int(kind == one) for kind in kinds) for one in each]
    if len(alone) > problem.spans.num_layers:
        raise _too_few_layers(problem.spans, len(alone), "straight")
    return replace(best_cuts(problem, alone), strategy="straight")


def _too_few_layers(spans: Spans, devices: int, name: str) -> PlanError:
    return PlanError(
        f"{name} needs at least as many layers as devices ({devices}), but the model has "
        f"{spans.num_layers}",
        remedy="use fewer devices, or a search that gives a stage several: hete_mp or exact",
    )


def hete_mp(problem: Problem, *, order: Order = "by_count") -> Solution:
    """SparsePipe's HETE-MP (Algorithms 1, 2): stages take devices in the :func:`kind_order`."""
    kinds = kind_order(order, problem.pool, problem.spans)
    found = _over(problem, prefixes(problem.pool, kinds), strategy="hete_mp")
    return replace(found, order=tuple(problem.pool.kinds[kind].name for kind in kinds))


def exact(problem: Problem) -> Solution:
    """The best of all plans, in which stages may have any devices."""
    likes = equal_kinds(problem.pool, problem.spans)
    few = merged(problem, likes)
    check_subsets(few)
    found = _over(few, subsets(few.pool), strategy="exact")
    return replace(found, stages=tuple(assign_devices(found.stages, problem.pool, likes)))


def exhaustive(problem: Problem) -> Solution:
    """The best of all plans, found by trying each; for small cases."""
    if problem.spans.nested_II is not None:
        raise PlanError(
            "exhaustive searches only chains of layers, but the profiled graph branches",
            remedy="use task.search=exact, which finds the best plan as well",
        )
    if problem.synchronous is None:
        stages = all_plans(problem.spans, problem.pool, problem.model, problem.memory)
    else:
        runs = RecomputationCosts(problem)
        least = problem.synchronous.microbatches.least_readers

        def more_s(plan: Sequence[Choice]) -> list[float]:
            has_samples = sum(plan[0].counts) >= least
            return runs.seconds_s(plan) if has_samples else [float("inf")] * len(plan)

        stages = all_plans(problem.spans, problem.pool, problem.model, None, more_s=more_s)
    if stages is None:
        raise no_fit_error(problem)
    return Solution(stages=tuple(stages), strategy="exhaustive")


Search = Callable[..., Solution]
"""A function that returns the solution of a problem; it may take keyword options."""

SEARCHES: Mapping[str, Search] = MappingProxyType(
    {
        "dp": dp,
        "mp": mp,
        "variance": variance,
        "straight": straight,
        "hete_mp": hete_mp,
        "exact": exact,
        "exhaustive": exhaustive,
    }
)


def search_by_name(name: str) -> Search:
    """Returns a search of :data:`SEARCHES`, or a function of another package by its dotted path.

    Such a function is called with the problem alone and returns a :class:`Solution`, or its stages
    in order as :class:`~sparsepipe.partition.devices.Choice`, which must use each device once and
    fit the memory.
    """
    found: Callable[..., Any] = by_name(name, SEARCHES, kind="search")
    if name in SEARCHES:
        return found

    def checked(problem: Problem) -> Solution:
        solution = found(problem)
        if not isinstance(solution, Solution):
            solution = Solution(stages=tuple(solution), strategy=name)
        stages, num_layers = solution.stages, problem.spans.num_layers
        bounds = [0, *(stage.end for stage in stages)]
        used = tuple(map(sum, zip(*(stage.counts for stage in stages), strict=True)))
        if (
            [stage.first for stage in stages] != bounds[:-1]
            or any(stage.end <= stage.first or not any(stage.counts) for stage in stages)
            or bounds[-1] != num_layers
            or used != problem.pool.counts
        ):
            raise PlanError(
                f"the result of {name} is not a valid plan: {list(stages)}",
                remedy="return stages that follow one another from layer 0 to "
                f"{num_layers - 1} and use the devices, {problem.pool.counts} by kind, once",
            )
        spans = check_memory(stages, problem)
        return replace(solution, spans=solution.spans if spans is None else spans)

    return checked


def best_cuts(problem: Problem, groups: Sequence[Counts]) -> Solution:
    """The best plan whose stages have the devices ``groups``, by kind, in order (Table III)."""
    used = [tuple(map(sum, zip(*groups[:n], strict=True))) for n in range(1, len(groups) + 1)]
    if used[-1] != problem.pool.counts or len(groups) > problem.spans.num_layers:
        raise PlanError(
            f"stages with {list(groups)} devices of each kind do not suit a pool of "
            f"{problem.pool.counts} and {problem.spans.num_layers} layers",
            remedy="use each device once, and at most one stage for each layer",
        )
    empty = (0,) * len(problem.pool.kinds)
    return _over(problem, [empty, *used], adjacent=True, strategy="given devices")


def _over(
    problem: Problem, counts: Sequence[Counts], *, adjacent: bool = False, strategy: str
) -> Solution:
    distinct = problem.distinct_stages
    lattice = Lattice(problem.pool, counts, adjacent=adjacent, distinct_stages=distinct)
    check_states(problem, sum(len(ways.sources_E) for ways in lattice.ways))
    found = best_plan(problem, lattice)
    if found is None:
        raise no_fit_error(problem)
    stages, spans = found
    return Solution(stages=tuple(stages), strategy=strategy, spans=spans)


ORDERS = ("by_count", "by_speed", "by_tflops")


def kind_order(order: str | Sequence[str], pool: DevicePool, spans: Spans) -> list[int]:
    """Indices of the kinds of devices, in the order in which stages take their devices.

    Args:
        order: ``by_count``: the model with the most devices over all hosts first, as in Table III;
            ``by_speed``: the kind that runs the entire model fastest first; ``by_tflops``: the one
            of the highest peak speed first; or a list of the kinds' names or ``HOST/NAME``. Ties
            keep the inventory's order.
        pool: the devices.
        spans: costs of the layers on each kind.
    """
    kinds = pool.kinds
    if not isinstance(order, str):
        found: list[int] = []
        for name in order:
            new = [
                k
                for k, kind in enumerate(kinds)
                if name in (kind.name, f"{kind.host}/{kind.name}") and k not in found
            ]
            found += new
            if not new:
                break
        else:
            if len(found) == len(kinds):
                return found
        known = ", ".join(dict.fromkeys(kind.name for kind in kinds))
        raise ConfigError(
            f"the order {list(order)} does not name each kind of device once",
            remedy=f"list each of {known} once, or HOST/NAME where several hosts have one",
        )
    of_name: Counter[str] = Counter()
    for kind in kinds:
        of_name[kind.name] += kind.count
    first = {kind.name: k for k, kind in reversed(list(enumerate(kinds)))}
    keys: dict[str, Callable[[int], Any]] = {
        "by_count": lambda k: (-of_name[kinds[k].name], first[kinds[k].name]),
        "by_speed": lambda k: spans.compute_s_KI[k, -1],
        "by_tflops": lambda k: -(kinds[k].tflops or 0),
    }
    if order not in keys:
        raise ConfigError(
            f"unknown order of devices {order!r}",
            remedy=f"use {', '.join(keys)}, or a list of the devices' names",
        )
    unknown = [kind.name for kind in kinds if kind.tflops is None]
    if order == "by_tflops" and unknown:
        raise ConfigError(
            f"the inventory does not give the TFLOP/s of {', '.join(unknown)}",
            remedy="add tflops to these devices in the inventory, or use by_speed",
        )
    return sorted(range(len(kinds)), key=keys[order])


MOST_WINDOWS = 100_000_000
"""The most combinations of a stage with a cut position for ``exact``, or with two states of a graph
(or two layers, if some are recomputed) for any search: about a minute and 1 GB."""

MOST_WALKS = 20_000_000
"""Largest number of sets of kinds times layers cubed for ``recompute=auto``: about a minute."""


def check_subsets(problem: Problem) -> None:
    """Raises a PlanError for problems with which ``exact`` would take many minutes."""
    pool, places = problem.pool, problem.spans.num_layers + 1
    stages = stages_between_subsets(pool)
    if stages * places <= MOST_WINDOWS:
        check_states(problem, stages)
        return
    one = "" if pool.is_uniform else " or one bandwidth for all links (task.bandwidth_bytes_per_s)"
    raise PlanError(
        f"{pool.num_devices} devices of {len(pool.kinds)} kinds have too many subsets for exact: "
        f"{stages:,} possible stages at {places:,} cut positions",
        remedy=f"use task.search=hete_mp{one}",
    )


def check_states(problem: Problem, stages: int) -> None:
    """Raises a PlanError if so many ``stages`` have too many pairs of positions where they may
    begin and end; chains of layers without recomputation need no pairs.
    """
    states, synchronous, kinds = problem.spans.num_layers, problem.synchronous, problem.pool.kinds
    if synchronous is None:
        pairs = stages * states**2 if problem.spans.nested_II is not None else 0
    else:
        pairs = stages * states**2 * len(problem.numbers_of_readers) * synchronous.recomputes
        if synchronous.setting == "auto":
            walks = min(stages, 2 ** len(kinds) - 1) * states**3
            pairs = max(pairs, walks * MOST_WINDOWS // MOST_WALKS)
    if pairs > MOST_WINDOWS:
        raise PlanError(
            f"{problem.pool.num_devices} devices and {states:,} layers or states of a graph are "
            f"too many: {stages:,} stages to consider for each pair of a beginning and an end",
            remedy="partition over fewer devices or with the layers of a block as one, use "
            "task.search=hete_mp instead of exact, or search without parallel.strategy.recompute "
            "and then train with it and the plan that was found (parallel.plan.file)",
        )
