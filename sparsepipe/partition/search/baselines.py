"""Two published partitioners: PipeDream's for several levels of machines, and Zhang and Sun's.

PipeDream's optimizer for machines of several levels (Narayanan et al., section 3.1) assumes hosts
with the same number of equal devices. Its first level finds the best pipeline of every span of
layers on the devices of one host, with the bandwidth inside it; its second treats a host as a
device that needs the time of the first level's pipeline for a span, with the bandwidth between
hosts. A stage of the second level on h hosts repeats each of its first-level stages on all of them.

Zhang and Sun, "A Parallel Pipeline Design for Training Deep Neural Networks", cut the layers so
that the variance of the stages' costs is least. Each of K equal devices is a stage. Whatever the
cuts are, the mean is the cost of all layers divided by K, so that the squared deviations add up
stage by stage, and a dynamic program over (stages left, cut position) finds the least sum. The cost
of a stage is that of its layers: transfers do not count.

Both are for asynchronous pipelines: recomputation and the memory of microbatches do not influence
their choice, but plans that do not fit are refused.

Shape suffixes: S stages; I = L + 1 cut positions, before the first layer and after each; [i, j] is
the span of layers from i to before j.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.layers import Floats, Ints, Spans
from sparsepipe.partition.costs.model import EQUAL
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.memory import MemoryModel, room_bytes
from sparsepipe.partition.problem import Problem, Solution, as_uniform
from sparsepipe.partition.search.checkpointed_stages import check_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """The best pipelines of all spans on some number of devices or, at the second level, hosts.

    Attributes:
        time_s_II: seconds between two minibatches of a span's pipeline; infinite where none exists.
        cut_II: the position at which its last stage begins.
        machines_II: number of devices or hosts of its last stage.
    """

    time_s_II: Floats
    cut_II: Ints
    machines_II: Ints


def mp_by_levels(problem: Problem, *, device: str) -> Solution:
    """PipeDream's plan for hosts with the same number of devices, all of which count as ``device``.

    Among plans with equal costs, it is the one whose last stages have the most devices.
    """
    pool, alike, layers = problem.pool, as_uniform(problem, device), problem.spans.num_layers
    numbers = dict.fromkeys(pool.inside, 0)
    for kind in pool.kinds:
        numbers[kind.host] += kind.count
    each, hosts = next(iter(numbers.values())), len(numbers)
    if {*numbers.values()} != {each}:
        raise PlanError(
            f"mp by levels needs the same number of devices on each host, not {numbers}",
            remedy="set task.levels=false, and task.search to mp, hete_mp or exact",
        )
    if layers**3 * (each * (each - 1) + hosts * (hosts - 1)) // 2 > MOST_STEPS:
        raise PlanError(
            f"{layers:,} layers on {hosts} x {each} devices are too many for mp by levels",
            remedy="set task.levels=false, and task.search to mp or hete_mp",
        )
    compute_s_I = alike.spans.compute_s_KI[0]
    compute_s_II = compute_s_I[None, :] - compute_s_I[:, None]
    inside = _level(alike, compute_s_II, machines=each, bytes_per_s=min(pool.inside.values()))
    between = _level(alike, inside[each].time_s_II, machines=hosts, bytes_per_s=pool.between)
    free = {
        host: [
            k for k, kind in enumerate(pool.kinds) if kind.host == host for _ in range(kind.count)
        ]
        for host in pool.inside
    }
    left, stages = list(free), []
    for begin, stop, number in _best_stages(between, 0, layers, hosts):
        taken, left = left[:number], left[number:]
        for first, end, replicas in _best_stages(inside, begin, stop, each):
            mine = [free[host].pop(0) for host in taken for _ in range(replicas)]
            counts = tuple(mine.count(kind) for kind in range(len(pool.kinds)))
            stages.append(Choice(first=first, end=end, counts=counts))
    spans = check_memory(stages, problem)
    return Solution(
        stages=tuple(stages),
        strategy="mp",
        assumed=alike,
        spans=spans,
        by_hosts=True,
        expected_s=float(between[hosts].time_s_II[0, layers]),
    )


def _level(
    problem: Problem, time_s_II: Floats, *, machines: int, bytes_per_s: float
) -> dict[int, _Split]:
    """Best pipelines of all spans on 1 to ``machines``, each of which takes ``time_s_II``."""
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
        best = found[m]
        for last in range(m - 1, 0, -1):
            cut_s_I = spans.cut_bytes_I * model.cut_s_per_byte(last, bytes_per_s=bytes_per_s)
            for cut in range(1, len(cut_s_I) - 1):
                first_s_I = np.maximum(found[m - last].time_s_II[:, cut], cut_s_I[cut])
                time_s_II = np.maximum(first_s_I[:, None], alone[last][cut][None, :])
                better_II = time_s_II < best.time_s_II * (1 - EQUAL)
                best.time_s_II[better_II] = time_s_II[better_II]
                best.cut_II[better_II] = cut
                best.machines_II[better_II] = last
    return found


def _best_stages(
    found: dict[int, _Split], first: int, end: int, machines: int
) -> list[tuple[int, int, int]]:
    """First layer, end (exclusive) and number of machines of the best pipeline's stages."""
    stages: list[tuple[int, int, int]] = []
    while machines:
        split = found[machines]
        cut, last = int(split.cut_II[first, end]), int(split.machines_II[first, end])
        stages.insert(0, (cut, end, last))
        end, machines = cut, machines - last
    return stages


def least_variance(
    spans: Spans, *, stages: int, memory: MemoryModel | None = None, room: float | None = None
) -> list[int] | None:
    """Finds the ends of stages whose seconds of compute vary least.

    Variances count as equal if stages differ by a billionth of their mean; among equal cuts, those
    are taken whose first stage ends first, then the second, and so on.

    Args:
        spans: costs on one kind of device.
        stages: K, the number of stages.
        memory: counts the bytes that a device keeps; None: memory is not limited.
        room: memory of each device in bytes; None: unknown.

    Returns:
        K cut positions, the last of which is after the last layer; None if no cuts fit the memory,
        or the model has fewer layers than stages.
    """
    compute_I = spans.compute_s_KI[0]
    mean_s = float(compute_I[-1]) / stages
    squares_II = (compute_I[None, :] - compute_I[:, None] - mean_s) ** 2
    allowed_II = spans.nested_II
    if allowed_II is None:
        allowed_II = np.triu(np.ones((spans.num_layers + 1,) * 2, dtype=np.bool_), 1)
    rest_SI = np.full((stages + 1, len(compute_I)), np.inf)
    rest_SI[stages, -1] = 0.0
    costs: list[Floats] = [squares_II] * stages
    for stage in reversed(range(stages)):
        fits_II = np.ones_like(allowed_II)
        if memory is not None and room is not None:
            in_flight = memory.in_flight(1, stages - stage)
            weights_I = memory.per_parameter_byte(in_flight, replicas=1) * spans.parameter_bytes_I
            before_I, after_I = (
                weights_I + in_flight * part_I for part_I in spans.stored_between()
            )
            kept_II = memory.reserved_bytes + after_I[None, :] - before_I[:, None]
            fits_II = kept_II <= room_bytes(room)
        costs[stage] = np.where(allowed_II & fits_II, squares_II, np.inf)
        rest_SI[stage] = (costs[stage] + rest_SI[stage + 1]).min(axis=1)
    least = float(rest_SI[0, 0])
    if not np.isfinite(least):
        return None
    limit = least * (1 + EQUAL) + stages * (EQUAL * mean_s) ** 2
    place, spent, ends = 0, 0.0, []
    for stage, cost_II in enumerate(costs):  # the first end within the limit
        within_I = spent + cost_II[place] + rest_SI[stage + 1] <= limit
        end = int(within_I.argmax())
        assert within_I[end], "some plan is the best one"
        spent += float(cost_II[place, end])
        place = end
        ends.append(end)
    return ends


MOST_STEPS = 3_000_000_000
"""The most combinations of a span, a cut and a division of machines that ``mp`` by levels tries:
about a minute on one core."""
