"""The searches by name: from a problem to the best plan of a kind.

========== ====================================================================================
``dp``      one stage: data parallelism over all devices
``mp``      PipeDream: all devices count as alike, with the profile of one that is named
``variance`` Zhang and Sun: each device is a stage, and stages cost as nearly the same as can be;
            all devices count as alike
``straight`` each device is a stage, and the slowest is as fast as can be
``hete_mp`` SparsePipe (Algorithms 1 and 2): stages take devices from a list sorted by kind
``exact``   any devices for each stage
``exhaustive`` the same by trying all plans
========== ====================================================================================

All but ``exhaustive`` and ``variance`` are one search (``search.py``) over different lattices of
devices. With one bandwidth between all devices ``exact`` is optimal over all contiguous splits and
all subsets of devices; with a bandwidth for each link it is optimal if a stage's all-reduce runs at
its slowest link, and a transfer between stages that are not on one and the same host at the link
between hosts. ``mp`` and ``hete_mp`` are optimal in the same sense among the plans that they look
at; ``variance`` (``variance.py``) looks for something else. Where stages recompute layers, times
and memory are counted with that (``counted_search.py``). Where the memory chooses these, all but
``exhaustive`` stop after so much work, and say so: by how much the best plan may be better, or, as
a :class:`~sparsepipe.errors.PlanError`, that they have found none, though there may be some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.partition.alike import dealt, like_kinds, merged
from sparsepipe.partition.counted_search import best_plan
from sparsepipe.partition.exhaustive import exhaustive as all_plans
from sparsepipe.partition.fleet import Counts, Fleet, Kind
from sparsepipe.partition.lattice import Lattice, prefixes, subsets
from sparsepipe.partition.orders import kind_order
from sparsepipe.partition.problem import Problem, Solution, taken_in_order
from sparsepipe.partition.recompute.costs import PlanSeconds
from sparsepipe.partition.room import check_room, no_room
from sparsepipe.partition.size import check_states, check_subsets
from sparsepipe.partition.spans import spans_of
from sparsepipe.partition.ties import Choice
from sparsepipe.partition.variance import ends_for, least_variance
from sparsepipe.partition.work import Work

Order = str | Sequence[str]


def dp(problem: Problem, *, work: Work | None = None) -> Solution:
    """One stage on all devices (Algorithm 2's start).

    Args:
        problem: what to partition.
        work: that may be done, see :func:`~sparsepipe.partition.counted_search.best_plan`.

    Raises:
        PlanError: it does not fit the memory, or the search stops before it knows.
    """
    fleet = problem.fleet
    return _over(problem, [(0,) * len(fleet.kinds), fleet.counts], strategy="dp", work=work)


def mp(problem: Problem, *, device: str) -> Solution:
    """PipeDream's optimizer: all devices count as one that is named.

    Stages take the devices in the inventory's order. Where links differ, all count as the
    slowest.

    Args:
        problem: what to partition.
        device: name of the one whose profile counts.

    Raises:
        ConfigError: the inventory has no such device; or layers are to be chosen, and a stage does
            not fit the real devices, which this search does not see, whatever is recomputed.
        PlanError: no plan fits the memory, or the best one does not fit the real devices; or the
            search, or that for layers on these devices, stops before it knows.
    """
    alike = alike_as(problem, device)
    stages = _over(alike, prefixes(alike.fleet, [0]), strategy="mp").stages
    taken = taken_in_order(stages, problem.fleet, range(len(problem.fleet.kinds)))
    spans = check_room(taken, problem)
    return Solution(stages=tuple(taken), strategy="mp", assumed=alike, spans=spans)


def variance(problem: Problem, *, device: str) -> Solution:
    """Zhang and Sun's heuristic: a stage for each device, with the least variance of their costs.

    Stages take the devices in the inventory's order. Transfers do not count.

    Args:
        problem: what to partition.
        device: name of the one whose profile counts for all.

    Raises:
        ConfigError: as of :func:`mp`.
        PlanError: there are more devices than layers, no cuts fit the memory, or the best ones do
            not fit the real devices, which this search does not see; or the search, or that for
            layers on these devices, stops before it knows.
    """
    alike = alike_as(problem, device)
    (kind,) = alike.fleet.kinds
    check_states(alike, kind.count)
    spans, number = alike.spans, kind.count
    ends = ends_for(alike, stages=number)
    if ends is None and least_variance(spans, stages=number) is None:
        raise PlanError(
            f"{spans.num_layers} layers do not make a stage for each of {number} devices, as "
            "variance has it",
            remedy="use fewer devices, or a search that gives a stage several: hete_mp or exact",
        )
    if ends is None:
        used = [(count,) for count in range(number + 1)]
        raise no_room(alike, _lattice(alike, used, adjacent=True))
    stages = [Choice(first=first, end=end, counts=(1,)) for first, end in pairwise([0, *ends])]
    taken = taken_in_order(stages, problem.fleet, range(len(problem.fleet.kinds)))
    again = check_room(taken, problem)
    return Solution(stages=tuple(taken), strategy="variance", assumed=alike, spans=again)


def straight(problem: Problem, *, work: Work | None = None) -> Solution:
    """The best plan with a stage for each device, in the inventory's order.

    PipeDream's optimizer calls it so, as its option ``straight_pipeline``.

    Args:
        problem: what to partition.
        work: that may be done, see :func:`~sparsepipe.partition.counted_search.best_plan`.

    Raises:
        PlanError: there are more devices than layers, no such plan fits the memory, or the search
            stops before it has found one.
    """
    kinds = range(len(problem.fleet.kinds))
    each = [kind for kind in kinds for _ in range(problem.fleet.counts[kind])]
    alone = [tuple(int(kind == one) for kind in kinds) for one in each]
    if len(alone) > problem.spans.num_layers:
        raise PlanError(
            f"{problem.spans.num_layers} layers do not make a stage for each of {len(alone)} "
            "devices, as straight has it",
            remedy="use fewer devices, or a search that gives a stage several: hete_mp or exact",
        )
    return replace(best_cuts(problem, alone, work=work), strategy="straight")


def hete_mp(problem: Problem, *, order: Order = "by_count", work: Work | None = None) -> Solution:
    """SparsePipe's HETE-MP: stages take devices from a sorted list (Algorithms 1 and 2).

    Args:
        problem: what to partition.
        order: of the list, see :func:`~sparsepipe.partition.orders.kind_order`.
        work: that may be done, see :func:`~sparsepipe.partition.counted_search.best_plan`.

    Raises:
        ConfigError: there is no such order.
        PlanError: no plan fits the memory, or the search stops before it has found one.
    """
    kinds = kind_order(order, problem.fleet, problem.spans)
    found = _over(problem, prefixes(problem.fleet, kinds), strategy="hete_mp", work=work)
    return replace(found, order=_names(kinds, problem.fleet))


def exact(problem: Problem, *, work: Work | None = None) -> Solution:
    """The best of all plans, with any devices for each stage.

    Args:
        problem: what to partition.
        work: that may be done, see :func:`~sparsepipe.partition.counted_search.best_plan`.

    Raises:
        PlanError: no plan fits the memory, there are more subsets of the devices than can be
            looked at, or the search stops before it has found a plan.
    """
    likes = like_kinds(problem.fleet, problem.spans)
    few = merged(problem, likes)
    check_subsets(few)
    found = _over(few, subsets(few.fleet), strategy="exact", work=work)
    return replace(found, stages=tuple(dealt(found.stages, problem.fleet, likes)))


def exhaustive(problem: Problem) -> Solution:
    """The best of all plans, by trying them all; for small cases.

    Raises:
        PlanError: no plan fits the memory, there are too many, or the graph branches.
    """
    if problem.spans.nested_II is not None:
        raise PlanError(
            "exhaustive looks at chains of layers, and the graph branches",
            remedy="use task.search=exact, which finds the best plan as well",
        )
    if problem.synchronous is None:
        stages = all_plans(problem.spans, problem.fleet, problem.model, problem.memory)
    else:
        counted_s, least = PlanSeconds(problem), problem.synchronous.microbatches.least_readers

        def more_s(plan: Sequence[Choice]) -> list[float]:
            has_samples = sum(plan[0].counts) >= least
            return counted_s(plan) if has_samples else [float("inf")] * len(plan)

        stages = all_plans(problem.spans, problem.fleet, problem.model, None, more_s=more_s)
    if stages is None:
        few = merged(problem, like_kinds(problem.fleet, problem.spans))
        raise no_room(few, _lattice(few, subsets(few.fleet)))
    return Solution(stages=tuple(stages), strategy="exhaustive")


def best_cuts(problem: Problem, groups: Sequence[Counts], *, work: Work | None = None) -> Solution:
    """The best plan whose stages have given devices, as a row of Table III gives them.

    Args:
        problem: what to partition.
        groups: devices of each kind of each stage; together all of them.
        work: that may be done, see :func:`~sparsepipe.partition.counted_search.best_plan`.

    Raises:
        PlanError: there are more stages than layers, the stages do not use each device once, no
            plan fits the memory, or the search stops before it has found one.
    """
    used = [tuple(map(sum, zip(*groups[:n], strict=True))) for n in range(1, len(groups) + 1)]
    if used[-1] != problem.fleet.counts or len(groups) > problem.spans.num_layers:
        raise PlanError(
            f"stages of {list(groups)} devices do not suit {problem.fleet.counts} devices and "
            f"{problem.spans.num_layers} layers",
            remedy="use each device once, and no more stages than there are layers",
        )
    empty = (0,) * len(problem.fleet.kinds)
    return _over(problem, [empty, *used], adjacent=True, strategy="given devices", work=work)


def alike_as(problem: Problem, device: str) -> Problem:
    """The problem with devices that are all like a named one, on links all like the slowest.

    Args:
        problem: with devices of several kinds.
        device: name of the one whose profile counts.

    Raises:
        ConfigError: the inventory has no such device.
    """
    fleet, spans = problem.fleet, problem.spans
    named = [k for k, kind in enumerate(fleet.kinds) if kind.name == device]
    if not named:
        raise ConfigError(
            f"there is no device {device!r} in the inventory",
            remedy=f"name one of {', '.join(dict.fromkeys(kind.name for kind in fleet.kinds))}",
        )
    limits = [kind.memory_bytes for kind in fleet.kinds if kind.memory_bytes is not None]
    one = Kind(
        name=device,
        host="any",
        count=fleet.num_devices,
        memory_bytes=min(limits, default=None),
        tflops=fleet.kinds[named[0]].tflops,
    )
    speed = min([*fleet.inside.values(), fleet.between])
    return replace(
        problem,
        fleet=Fleet(kinds=(one,), inside={"any": speed}, between=speed),
        spans=spans_of(problem.profiles[named[0] : named[0] + 1])
        if problem.profiles
        else replace(spans, compute_s_KI=spans.compute_s_KI[named[:1]]),
        profiles=problem.profiles[named[0] : named[0] + 1],
    )


def _over(
    problem: Problem,
    counts: Sequence[Counts],
    *,
    adjacent: bool = False,
    strategy: str,
    work: Work | None = None,
) -> Solution:
    lattice = _lattice(problem, counts, adjacent=adjacent)
    check_states(problem, sum(len(ways.sources_E) for ways in lattice.ways))
    found = best_plan(problem, lattice, work)
    if found is None:
        raise no_room(problem, lattice)
    stages, spans = found
    return Solution(stages=tuple(stages), strategy=strategy, spans=spans)


def _lattice(problem: Problem, counts: Sequence[Counts], *, adjacent: bool = False) -> Lattice:
    told = problem.stages_told
    return Lattice(problem.fleet, counts, adjacent=adjacent, stages_told=told)


def _names(kinds: Sequence[int], fleet: Fleet) -> tuple[str, ...]:
    return tuple(fleet.kinds[kind].name for kind in kinds)
