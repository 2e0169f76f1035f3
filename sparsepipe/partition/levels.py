"""PipeDream by levels: first inside a host, then over hosts (Narayanan et al., section 3.1).

PipeDream's optimizer for machines of several levels takes hosts of equally many devices that are
all alike. Its first level finds the best pipeline of every span of layers on the devices of one
host, with the bandwidth inside; its second takes a host for a device, whose time for a span is
that of the first level's pipeline, with the bandwidth between hosts. A stage of the second level
on h hosts has each of its first level's stages h times.

Shape suffixes: I = L + 1 places a model can be cut at; [i, j] is the span from i to before j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparsepipe.errors import PlanError
from sparsepipe.partition.fleet import Counts, Fleet
from sparsepipe.partition.layer_tables import LayerTables
from sparsepipe.partition.problem import Problem, Solution
from sparsepipe.partition.room import check_room
from sparsepipe.partition.searches import alike_as
from sparsepipe.partition.size import check_levels
from sparsepipe.partition.spans import Floats
from sparsepipe.partition.ties import EQUAL, Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """How the best pipelines on a number of machines end.

    Attributes:
        time_s_II: of the best pipeline of each span; infinite where there is none.
        cut_II: where its last stage begins.
        machines_II: of its last stage.
    """

    time_s_II: Floats
    cut_II: NDArray[np.intp]
    machines_II: NDArray[np.intp]


def mp_by_levels(problem: Problem, *, device: str) -> Solution:
    """PipeDream's plan for hosts of equally many devices, all counted as one that is named.

    Of plans that cost the same the one whose last stages have most machines is taken. Second runs
    of layers count as far as they do not depend on the stages: not those that the memory chooses.

    Args:
        problem: a chain of layers, and hosts.
        device: name of the one whose profile counts.

    Raises:
        PlanError: the hosts have different numbers of devices, there are too many layers for so
            many, or the plan does not fit the memory, which this search does not look at; or the
            search for layers that would stops before it knows.
        ConfigError: the inventory has no such device; or layers are to be chosen, and a stage does
            not fit, whatever is recomputed.
    """
    fleet, alike = problem.fleet, alike_as(problem, device)
    stages, _ = two_levels(alike, fleet)
    spans = check_room(stages, problem)
    return Solution(stages=tuple(stages), strategy="mp", assumed=alike, spans=spans)


def two_levels(alike: Problem, fleet: Fleet) -> tuple[list[Choice], float]:
    """Stages on the fleet's devices, and the time that PipeDream expects of them.

    Args:
        alike: layers, and what they cost on one device.
        fleet: devices in hosts of equally many, and their links.

    Raises:
        PlanError: the hosts have different numbers of devices, or there are too many layers for
            so many.
    """
    each, hosts, layers = _devices_a_host(fleet), len(fleet.inside), alike.spans.num_layers
    check_levels(layers, each=each, hosts=hosts)
    compute_s_I = alike.spans.compute_s_KI[0]
    if alike.synchronous is not None:
        compute_s_I = compute_s_I + LayerTables(alike).anywhere_I
    compute_s_II = compute_s_I[None, :] - compute_s_I[:, None]
    inside = _level(alike, compute_s_II, machines=each, bytes_per_s=min(fleet.inside.values()))
    host_s_II = inside[each].time_s_II
    between = _level(alike, host_s_II, machines=hosts, bytes_per_s=fleet.between)
    free = _Free(fleet)
    stages = []
    for begin, stop, number in _stages(between, 0, layers, hosts):
        taken = free.hosts(number)
        for first, end, replicas in _stages(inside, begin, stop, each):
            stages.append(Choice(first=first, end=end, counts=free.take(taken, replicas)))
    return stages, float(between[hosts].time_s_II[0, layers])


class _Free:
    """Hosts and devices that no stage has yet, in the inventory's order."""

    def __init__(self, fleet: Fleet) -> None:
        self._num_kinds = len(fleet.kinds)
        self._hosts = list(fleet.inside)
        self._kinds = {
            host: [
                k
                for k, kind in enumerate(fleet.kinds)
                if kind.host == host
                for _ in range(kind.count)
            ]
            for host in self._hosts
        }

    def hosts(self, number: int) -> list[str]:
        """The next hosts, for a stage of the second level."""
        taken, self._hosts = self._hosts[:number], self._hosts[number:]
        return taken

    def take(self, hosts: Sequence[str], replicas: int) -> Counts:
        """As many devices of each of some hosts, counted by kind."""
        counts = [0] * self._num_kinds
        for host in hosts:
            for _ in range(replicas):
                counts[self._kinds[host].pop(0)] += 1
        return tuple(counts)


def _devices_a_host(fleet: Fleet) -> int:
    numbers = {
        host: sum(kind.count for kind in fleet.kinds if kind.host == host) for host in fleet.inside
    }
    if len(set(numbers.values())) > 1:
        told = ", ".join(f"{host} {number}" for host, number in numbers.items())
        raise PlanError(
            f"the hosts have different numbers of devices: {told}",
            remedy="partition them flat (task.levels=false), or with hete_mp or exact",
        )
    return next(iter(numbers.values()))


def _level(
    problem: Problem, time_s_II: Floats, *, machines: int, bytes_per_s: float
) -> dict[int, _Split]:
    """The best pipelines of all spans on 1, 2, ... machines that take a time for each span."""
    spans, model = problem.spans, problem.model
    parameters_I = spans.parameter_bytes_I
    bytes_II = parameters_I[None, :] - parameters_I[:, None]
    chain_II = np.tri(len(parameters_I), dtype=np.bool_)
    empty_II = chain_II if spans.nested_II is None else ~spans.nested_II
    alone = {
        m: np.where(
            empty_II,
            np.inf,
            time_s_II / m + bytes_II * model.sync_s_per_byte(m, bytes_per_s=bytes_per_s) / m,
        )
        for m in range(1, machines + 1)
    }
    found: dict[int, _Split] = {}
    for m in range(1, machines + 1):
        found[m] = _Split(
            time_s_II=alone[m].copy(),
            cut_II=np.broadcast_to(np.arange(len(parameters_I))[:, None], alone[m].shape).copy(),
            machines_II=np.full(alone[m].shape, m, dtype=np.intp),
        )
        for last in range(m - 1, 0, -1):
            cut_s_I = spans.cut_bytes_I * model.cut_s_per_byte(last, bytes_per_s=bytes_per_s)
            _append(found[m], found[m - last].time_s_II, alone[last], cut_s_I, last)
    return found


def _append(
    best: _Split, before_s_II: Floats, stage_s_II: Floats, cut_s_I: Floats, machines: int
) -> None:
    """Takes the pipelines that end in a stage on so many machines where they are better."""
    for cut in range(1, len(cut_s_I) - 1):
        first_s_I = np.maximum(before_s_II[:, cut], cut_s_I[cut])
        time_s_II = np.maximum(first_s_I[:, None], stage_s_II[cut][None, :])
        better_II = time_s_II < best.time_s_II * (1 - EQUAL)
        best.time_s_II[better_II] = time_s_II[better_II]
        best.cut_II[better_II] = cut
        best.machines_II[better_II] = machines


def _stages(
    found: dict[int, _Split], first: int, end: int, machines: int
) -> list[tuple[int, int, int]]:
    """First layer, end and machines of each stage of the best pipeline of a span."""
    stages: list[tuple[int, int, int]] = []
    while machines:
        split = found[machines]
        cut, last = int(split.cut_II[first, end]), int(split.machines_II[first, end])
        stages.insert(0, (cut, end, last))
        end, machines = cut, machines - last
    return stages
