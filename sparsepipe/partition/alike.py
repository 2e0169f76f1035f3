"""Devices that are alike wherever they are, and a fleet in which they are of one kind.

Devices of the same model with the same memory are alike on one host, and where one bandwidth holds
between any two devices, whatever their hosts. ``exact`` then has far fewer
subsets to look at. Of the plans that differ only in the hosts of like devices it takes the one
whose stages, one after another, have those of the hosts that the inventory lists first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsepipe.partition.fleet import Counts, Fleet
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.spans import Spans
from sparsepipe.partition.ties import Choice


def like_kinds(fleet: Fleet, spans: Spans) -> list[int]:
    """For each kind the number of the first one that is like it.

    Args:
        fleet: the devices.
        spans: what layers cost on each kind.
    """
    first: dict[object, int] = {}
    found = []
    for k, kind in enumerate(fleet.kinds):
        host = "any" if fleet.is_uniform else kind.host
        like = kind.name, kind.memory_bytes, host, tuple(spans.compute_s_KI[k])
        found.append(first.setdefault(like, k))
    return found


def merged(problem: Problem, likes: Sequence[int]) -> Problem:
    """The problem with one kind for all that are alike.

    Args:
        problem: as it is.
        likes: of :func:`like_kinds`.
    """
    fleet, spans = problem.fleet, problem.spans
    if len(set(likes)) == len(likes):
        return problem
    inside, between = fleet.inside, fleet.between
    if fleet.is_uniform:  # a host of one device has now several, on a link that was none
        between = fleet.cut_bytes_per_s(0, 0)
        inside = dict.fromkeys(inside, between)
    firsts = sorted(set(likes))
    kinds = tuple(
        replace(kind, count=count)
        for kind, count in zip(
            (fleet.kinds[first] for first in firsts), together(fleet.counts, likes), strict=True
        )
    )
    return replace(
        problem,
        fleet=Fleet(kinds=kinds, inside=inside, between=between),
        spans=replace(spans, compute_s_KI=spans.compute_s_KI[firsts]),
        profiles=tuple(problem.profiles[first] for first in firsts) if problem.profiles else (),
    )


def together(counts: Sequence[int], likes: Sequence[int]) -> Counts:
    """Devices of the kinds of a merged fleet.

    Args:
        counts: of each kind.
        likes: of :func:`like_kinds`.
    """
    sums = dict.fromkeys(sorted(set(likes)), 0)
    for like, count in zip(likes, counts, strict=True):
        sums[like] += count
    return tuple(sums.values())


def dealt(stages: Sequence[Choice], fleet: Fleet, likes: Sequence[int]) -> list[Choice]:
    """Stages of a merged fleet on the devices that there are, first hosts first.

    Args:
        stages: with devices of the merged kinds.
        fleet: the devices.
        likes: of :func:`like_kinds`.
    """
    left = list(fleet.counts)
    found = []
    for stage in stages:
        wanted = dict(zip(sorted(set(likes)), stage.counts, strict=True))
        taken = []
        for kind, like in enumerate(likes):
            number = min(left[kind], wanted[like])
            left[kind] -= number
            wanted[like] -= number
            taken.append(number)
        found.append(replace(stage, counts=tuple(taken)))
    return found
