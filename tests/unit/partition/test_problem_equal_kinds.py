"""Like devices count together, and searches that would not end are refused."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from sparsepipe.errors import PlanError
from sparsepipe.partition.costs.layers import Spans
from sparsepipe.partition.costs.model import cost_model, plan_times
from sparsepipe.partition.devices import Choice, DeviceKind, DevicePool
from sparsepipe.partition.explanation import device_names
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.partition.problem import Problem, equal_kinds, merged
from sparsepipe.partition.search.algorithms import exact
from sparsepipe.partition.search.bisection import best_plan
from sparsepipe.partition.search.lattice import Lattice, stages_between_subsets, subsets

MODELS = ("eq4", "pipedream", "sparsepipe_hete")


def many_hosts(
    seed: int, *, hosts: int, each: int, inside: float = 1e9, between: float = 1e9
) -> Problem:
    """Hosts of two models of devices, and 12 layers."""
    rng = random.Random(seed)
    of_model = {"A": 12e9, "B": 8e9}
    kinds = tuple(
        DeviceKind(name=name, host=f"h{h}", count=each, memory_bytes=of_model[name])
        for h in range(hosts)
        for name in of_model
    )
    seconds = {name: [rng.uniform(0.001, 0.1) for _ in range(12)] for name in of_model}
    parameters = [rng.uniform(0, 4e8) for _ in range(12)]
    stored = [rng.uniform(0, 2e9) for _ in range(12)]
    return Problem(
        pool=DevicePool(
            kinds=kinds, inside={f"h{h}": inside for h in range(hosts)}, between=between
        ),
        spans=Spans(
            compute_s_KI=np.array([[0, *np.cumsum(seconds[kind.name])] for kind in kinds]),
            parameter_bytes_I=np.array([0, *np.cumsum(parameters)]),
            stored_bytes_I=np.array([0, *np.cumsum(stored)]),
            cut_bytes_I=np.array([0.0, *(rng.uniform(0, 2e7) for _ in range(11)), 0.0]),
        ),
        model=cost_model(MODELS[seed % 3]),
        memory=MemoryModel() if seed % 2 else None,
    )


def unmerged(problem: Problem) -> list[Choice] | None:
    """By the same search, with each host's devices as a kind of their own."""
    lattice = Lattice(problem.pool, subsets(problem.pool))
    found = best_plan(problem, lattice)
    return None if found is None else found[0]


@pytest.mark.parametrize("seed", range(6))
def test_as_good_as_with_the_hosts_apart(seed: int) -> None:
    problem = many_hosts(seed, hosts=3 - seed % 2, each=1 + seed % 2)
    likes = equal_kinds(problem.pool, problem.spans)
    assert likes == [0, 1] * (3 - seed % 2)
    assert merged(problem, likes).pool.num_devices == problem.pool.num_devices
    apart = unmerged(problem)
    assert apart is not None
    ours = exact(problem).stages
    assert quality(problem, list(ours)) == pytest.approx(quality(problem, apart))
    names = [name for stage in device_names(ours, problem.pool) for name in stage]
    each = problem.pool.kinds[0].count
    assert sorted(names) == [
        f"h{h}/{m}/{n}" for h in range(3 - seed % 2) for m in "AB" for n in range(each)
    ]


def quality(problem: Problem, plan: list[Choice]) -> list[float]:
    """Bottleneck, number of stages, second-worst stage."""
    stages, cuts = plan_times(plan, problem.spans, problem.pool, problem.model)
    return [max(stages + cuts), len(stages), sorted(stages)[-2] if len(stages) > 1 else 0.0]


def test_one_device_a_host_needs_no_link_inside() -> None:
    inside = many_hosts(0, hosts=8, each=1)
    one_each = replace(inside.pool, kinds=inside.pool.kinds[::2], inside=no_links(8))
    assert one_each.is_uniform
    assert one_each.cut_bytes_per_s(0, 0) == 1e9
    problem = replace(
        inside,
        pool=one_each,
        spans=replace(inside.spans, compute_s_KI=inside.spans.compute_s_KI[::2]),
    )
    likes = equal_kinds(problem.pool, problem.spans)
    assert likes == [0] * 8
    few = merged(problem, likes).pool
    assert few.counts == (8,)
    assert few.sync_bytes_per_s([3]) == one_each.sync_bytes_per_s([1, 1, 1, 0, 0, 0, 0, 0]) == 1e9


def no_links(hosts: int) -> dict[str, float]:
    return {f"h{h}": float("inf") for h in range(hosts)}


def test_hosts_with_faster_links_inside_stay_apart() -> None:
    problem = many_hosts(0, hosts=3, each=1, inside=8e9)
    assert equal_kinds(problem.pool, problem.spans) == list(range(6))


@pytest.mark.parametrize(("inside", "exactly"), [(1e9, True), (8e9, False)])
def test_stages_are_counted_before_they_are_made(inside: float, exactly: bool) -> None:
    pool = many_hosts(0, hosts=2, each=2, inside=inside).pool
    made = sum(len(ways.sources_E) for ways in Lattice(pool, subsets(pool)).ways)
    told = stages_between_subsets(pool)
    assert told == made if exactly else made <= told <= 2 * made


def test_too_many_subsets_are_refused_at_once_with_a_remedy() -> None:
    with pytest.raises(PlanError, match="64 devices of 16 kinds") as caught:
        exact(many_hosts(0, hosts=8, each=4, inside=8e9))
    assert "hete_mp" in caught.value.remedy
    assert "task.bandwidth_bytes_per_s" in caught.value.remedy
