"""PipeDream by levels, against its recurrences written out as recursions."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.layers import Spans
from sparsepipe.partition.costs.model import CostModel, cost_model, plan_times
from sparsepipe.partition.devices import Choice, DeviceKind, DevicePool
from sparsepipe.partition.explanation import explain
from sparsepipe.partition.problem import Problem
from sparsepipe.partition.search.baselines import mp_by_levels
from tests.support.instances import on_one_host, random_problem

INSIDE, BETWEEN = 4.0, 1.0
VGG16 = """
    46.92 1605632 1792,     9.999 1605632 0,        159.531 1605632 36928,  9.766 1605632 0,
    9.374 401408 0,         54.803 802816 73856,    5.097 802816 0,         75.441 802816 147584,
    5.133 802816 0,         4.999 200704 0,         29.149 401408 295168,   2.757 401408 0,
    44.481 401408 590080,   3.103 401408 0,         48.133 401408 590080,   2.87 401408 0,
    2.682 100352 0,         23.823 200704 1180160,  1.722 200704 0,         37.259 200704 2359808,
    1.527 200704 0,         40.445 200704 2359808,  1.523 200704 0,         1.583 50176 0,
    12.989 50176 2359808,   1.05 50176 0,           11.466 50176 2359808,   0.653 50176 0,
    12.69 50176 2359808,    0.63 50176 0,           0.787 12544 0,          0 12544 0,
    7.05 2048 102764544,    0.407 2048 0,           0 2048 0,               1.443 2048 16781312,
    0.309 2048 0,           0 2048 0,               0.941 500 4097000
"""
"""PipeDream's own profile (profiler/image_classification/profiles/vgg16/graph.txt of
github.com/msr-fiddle/pipedream): of each layer ms of both passes, KiB of its output, parameters."""


def problem_of(seed: int, hosts: int, each: int, model: str | None = None) -> Problem:
    spans = random_problem(seed)[0].spans
    kinds = tuple(DeviceKind(name="gpu", host=f"h{n}", count=each) for n in range(hosts))
    spans = Spans(
        compute_s_KI=spans.compute_s_KI[[0] * hosts],
        parameter_bytes_I=spans.parameter_bytes_I,
        stored_bytes_I=spans.stored_bytes_I,
        cut_bytes_I=spans.cut_bytes_I,
    )
    inside = {kind.host: INSIDE for kind in kinds}
    drawn = random.Random(seed).choice(["eq4", "pipedream", "sparsepipe_hete"])
    pool = DevicePool(kinds=kinds, inside=inside, between=BETWEEN)
    return Problem(pool=pool, spans=spans, model=cost_model(model or drawn))


def recursion(spans: Spans, model: CostModel, hosts: int, each: int) -> float:
    """A^2(0, L, hosts) with T^2 = A^1(i, j, each), as the paper writes it (section 3.1)."""

    def level(alone: object, speed: float) -> object:
        def stage(i: int, j: int, m: int) -> float:
            return model.stage_s(
                alone(i, j), spans.parameter_bytes(i, j), replicas=m, bytes_per_s=speed
            )

        @cache
        def best(i: int, j: int, m: int) -> float:
            times = [stage(i, j, m)]
            for cut in range(i + 1, j):
                for last in range(1, m):
                    moved = spans.cut_bytes_I[cut] * model.cut_s_per_byte(last, bytes_per_s=speed)
                    times.append(max(best(i, cut, m - last), moved, stage(cut, j, last)))
            return min(times)

        return best

    sums_I = spans.compute_s_KI[0]
    inner = level(lambda i, j: float(sums_I[j] - sums_I[i]), INSIDE)
    outer = level(lambda i, j: inner(i, j, each), BETWEEN)
    return float(outer(0, spans.num_layers, hosts))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (3, 1), (1, 3), (2, 3)])
def test_the_time_is_that_of_the_recursions(seed: int, hosts: int, each: int) -> None:
    problem = problem_of(seed, hosts, each)
    solution = mp_by_levels(problem, device="gpu")
    stages, time_s = list(solution.stages), solution.expected_s
    assert time_s == pytest.approx(recursion(problem.spans, problem.model, hosts, each))
    # A stage is on whole groups of hosts, on each of them with as many devices; all are used.
    assert all(len({n for n in stage.counts if n}) == 1 for stage in stages)
    assert [sum(on) for on in zip(*(stage.counts for stage in stages), strict=True)] == [
        each
    ] * hosts
    if 1 in (hosts, each):  # then there is one level only, and its time is the plan's
        assert own_time(problem, stages) == pytest.approx(time_s)
    assert explain(problem, solution).bottleneck_s == own_time(problem, stages)


def own_time(problem: Problem, stages: list[Choice]) -> float:
    times, cuts = plan_times(stages, problem.spans, problem.pool, problem.model, by_hosts=True)
    return max(times + cuts)


@pytest.mark.parametrize("model", ["eq4", "pipedream", "sparsepipe_mp"])
def test_each_host_is_a_stage_of_the_second_level(model: str) -> None:
    # Where each host is a stage of its own, the time of the two levels is the plan's; it was not
    # when stages took devices in the inventory's order, and half of each from another host, nor
    # where receivers on one host counted as a link each.
    alone = 0
    for seed in range(60):
        problem = problem_of(seed, 2, 2, model=model)
        solution = mp_by_levels(problem, device="gpu")
        stages, time_s = list(solution.stages), solution.expected_s
        if 0 in stages[0].counts:
            alone += 1
            assert all(0 in stage.counts for stage in stages)
            assert own_time(problem, stages) == pytest.approx(time_s)
    assert alone > 5


def test_the_time_is_that_which_pipedream_prints() -> None:
    """``optimizer_graph_hierarchical.py -n 8 2 -b 12000000000 3125000000
    --activation_compression_ratio 1`` prints 0.06576668672: three devices of one host share the
    link by which the second stage's input comes to them."""
    rows = [[float(word) for word in row.split()] for row in VGG16.split(",")]
    compute_ms_L, activation_kib_L, parameters_L = np.array(rows).T
    sums_I = [
        np.concatenate([[0.0], np.cumsum(each)]) for each in (compute_ms_L / 1e3, 4 * parameters_L)
    ]
    spans = Spans(
        compute_s_KI=sums_I[0][None].repeat(2, axis=0),
        parameter_bytes_I=sums_I[1],
        stored_bytes_I=np.zeros(len(rows) + 1),
        cut_bytes_I=np.array([0.0, *1024 * activation_kib_L[:-1], 0.0]),
    )
    kinds = tuple(DeviceKind(name="gpu", host=f"h{n}", count=8) for n in range(2))
    pool = DevicePool(kinds=kinds, inside={"h0": 12e9, "h1": 12e9}, between=3.125e9)
    problem = Problem(pool=pool, spans=spans, model=cost_model("pipedream"))
    solution = mp_by_levels(problem, device="gpu")
    assert solution.config == "8-3-2-2-1"
    assert solution.expected_s == pytest.approx(0.06576668672, rel=1e-9)
    assert explain(problem, solution).bottleneck_s == solution.expected_s


def test_too_many_layers_are_refused_with_a_remedy() -> None:
    many = np.linspace(0.0, 1.0, 801)
    spans = Spans(
        compute_s_KI=many[None, :].repeat(4, axis=0),
        parameter_bytes_I=many,
        stored_bytes_I=many,
        cut_bytes_I=many,
    )
    kinds = tuple(DeviceKind(name="gpu", host=f"h{n}", count=8) for n in range(4))
    pool = DevicePool(kinds=kinds, inside={k.host: INSIDE for k in kinds}, between=BETWEEN)
    problem = Problem(pool=pool, spans=spans, model=cost_model("eq4"))
    with pytest.raises(PlanError, match="800 layers on 4 x 8 devices") as caught:
        mp_by_levels(problem, device="gpu")
    assert "task.levels=false" in caught.value.remedy
    # One device on one host leaves nothing to share out, whatever the layers.
    alone = on_one_host(replace(spans, compute_s_KI=many[None]), {"gpu": 1})
    assert mp_by_levels(alone, device="gpu").config == "1"


def test_unequal_hosts_are_refused() -> None:
    problem = problem_of(0, 2, 2)
    kinds = (problem.pool.kinds[0], DeviceKind(name="gpu", host="h1", count=3))
    unequal = Problem(
        pool=DevicePool(kinds=kinds, inside=problem.pool.inside, between=BETWEEN),
        spans=problem.spans,
        model=problem.model,
    )
    with pytest.raises(PlanError, match="same number of devices on each host"):
        mp_by_levels(unequal, device="gpu")
