"""Whether a search through all subsets of the devices will end within about a minute."""

from __future__ import annotations

from sparsepipe.errors import PlanError
from sparsepipe.partition.lattice import stages_between_subsets
from sparsepipe.partition.problem import Problem

MOST_WINDOWS = 100_000_000
"""Stages times places that ``exact`` looks at: about a minute on one core, and 1 GB."""


def check_size(problem: Problem) -> None:
    """Refuses what would take ``exact`` much more than a minute.

    Raises:
        PlanError: the devices have too many subsets for a model of so many layers.
    """
    fleet = problem.fleet
    stages, places = stages_between_subsets(fleet), problem.spans.num_layers + 1
    if stages * places <= MOST_WINDOWS:
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
