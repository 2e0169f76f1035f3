"""Whether a search will end within about a minute."""

from __future__ import annotations

from sparsepipe.errors import PlanError
from sparsepipe.partition.lattice import stages_between_subsets
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.recompute.bounds import BOUNDS
from sparsepipe.partition.synchronous import SynchronousStages

MOST_WINDOWS = 100_000_000
"""Stages times places that ``exact`` looks at, or any search times pairs of a graph's states, or of
layers where some are recomputed: about a minute on one core, and 1 GB."""


def check_subsets(problem: Problem) -> None:
    """Refuses what would take ``exact`` much more than a minute.

    Raises:
        PlanError: the devices have too many subsets for a model of so many layers.
    """
    fleet, places = problem.fleet, problem.spans.num_layers + 1
    stages = stages_between_subsets(fleet)
    if stages * places <= MOST_WINDOWS:
        check_states(problem, stages)
        return
    one = (
        ""
        if fleet.is_uniform
        else "; or give one bandwidth for all links (task.bandwidth_bytes_per_s), with which like "
        "devices of all hosts count together"
    )
    raise PlanError(
        f"{fleet.num_devices} devices of {len(fleet.kinds)} kinds have too many subsets for exact: "
        f"{stages:,} stages of them at {places:,} places of the model",
        remedy=f"use task.search=hete_mp{one}",
    )


MOST_STEPS = 3_000_000_000
"""Spans, times cuts, times ways to share machines out, that ``mp`` by levels looks at: about a
minute on one core."""


def check_levels(layers: int, *, each: int, hosts: int) -> None:
    """Refuses what would take ``mp`` by levels much more than a minute.

    Args:
        layers: L, or states of a graph.
        each: devices of a host.
        hosts: how many there are.

    Raises:
        PlanError: there are too many layers for so many devices.
    """
    steps = layers**3 * (each * (each - 1) + hosts * (hosts - 1)) // 2
    if steps > MOST_STEPS:
        raise PlanError(
            f"{layers:,} layers on {hosts} hosts of {each} devices are too many for mp by levels",
            remedy="partition them flat (task.levels=false), or with hete_mp",
        )


def check_states(problem: Problem, stages: int) -> None:
    """Refuses what has too many pairs of a begin and an end of a stage for so many stages.

    Args:
        problem: a branching graph, or a chain of layers some of which are recomputed; of one that
            recomputes none no pairs are looked at, and it is never refused.
        stages: that the search has to choose from.

    Raises:
        PlanError: a search would take much more than a minute.
    """
    if problem.synchronous is not None and not problem.synchronous.recomputes:
        return
    states = problem.spans.num_layers
    each = stages if problem.synchronous is None else _figures(problem, problem.synchronous, stages)
    if each * states**2 <= MOST_WINDOWS:
        return
    if problem.synchronous is not None:
        raise PlanError(
            f"{states:,} layers have too many pairs of a first and a last one for "
            f"{problem.fleet.num_devices} devices: where layers are recomputed, {each:,} stages "
            "and bounds are to be looked at for each pair",
            remedy="use task.search=hete_mp, partition over fewer devices, or search without "
            "parallel.strategy.recompute and train with it by that plan (parallel.plan.file)",
        )
    if problem.spans.nested_II is not None:
        raise PlanError(
            f"the graph has {states:,} states, too many pairs of them for "
            f"{problem.fleet.num_devices} devices: {stages:,} stages to look at for each pair",
            remedy="merge the layers of a block into one node, profile the model as a chain of "
            "blocks, or partition over fewer devices",
        )


def _figures(problem: Problem, what: SynchronousStages, stages: int) -> int:
    """Of each pair of a first and a last layer, what a search counts at least.

    That is once for each number of devices that the first stage may have, where memory counts; and
    the bounds of stages on each set of kinds, where it chooses the layers. How often a search looks
    again is limited as it does so (``work.py``).
    """
    kinds = len(problem.fleet.kinds)
    searches = len(problem.numbers_of_readers)
    sets = min(stages, 2**kinds - 1) if what.is_automatic else 0
    return stages * searches + sets * BOUNDS
