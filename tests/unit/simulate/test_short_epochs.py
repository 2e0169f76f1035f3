"""How fast a full pipeline is, told by epochs too short to show it: closed forms."""

from __future__ import annotations

import math

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import asynchronous
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import pace
from sparsepipe.simulate.workload import Workload
from tests.support.plans import plan_of

EXACT = 1e-9


@pytest.mark.parametrize("ranks", [5, 8, 64, 128])
@pytest.mark.parametrize("rounds", [0.0, 1.0, 2.0, 2.4, 30.0])
def test_data_parallelism_of_a_few_rounds(ranks: int, rounds: float) -> None:
    """Ranks that are alike: every round takes as long, also a last one that is not full."""
    minibatches = max(1, int(rounds * ranks))
    workload = Workload.uniform(plan_of(str(ranks)), parameter_bytes=80.0)
    setting = Setting(network=ClusterNetwork.flat(ranks, Link(bytes_per_s=10.0)), algorithm="ring")
    round_s = 3.0 + 2 * (ranks - 1) / ranks * 80.0 / 10.0
    found = pace(workload, minibatches, setting)
    assert found.minibatch_s == pytest.approx(round_s / ranks, rel=EXACT)
    assert found.busy == pytest.approx([3.0 / round_s] * ranks, rel=EXACT)
    assert found.total_s == pytest.approx(math.ceil(minibatches / ranks) * round_s, rel=EXACT)
    assert found.minibatches == minibatches


@pytest.mark.parametrize("scale", [[1, 3, 2, 1], [5, 1, 1, 1], [1, 1, 1, 4]])
@pytest.mark.parametrize("minibatches", [1, 2, 3, 4, 5, 7])
def test_pipelines_that_are_not_full_before_they_drain(scale, minibatches: int) -> None:
    plan = plan_of("1-1-1-1")
    workload, setting = Workload.uniform(plan, scale=scale), Setting(network=ClusterNetwork.flat(4))
    found = pace(workload, minibatches, setting)
    assert found.minibatch_s == pytest.approx(3.0 * max(scale), rel=EXACT)
    assert found.busy == pytest.approx([each / max(scale) for each in scale], rel=EXACT)
    run = simulate(asynchronous(plan, minibatches), workload, setting)
    assert found.total_s == pytest.approx(run.end_s, rel=EXACT)


def test_where_no_cycle_is_found() -> None:
    """Turns of 7, 9 and 11 replicas repeat after 693 minibatches: by so many a run is longer."""
    plan = plan_of("7-9-11")
    workload = Workload.uniform(
        plan, scale=[7.0, 18.0, 11.0], output_bytes=1.0, parameter_bytes=1.0
    )
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks, Link(bytes_per_s=10.0)))
    whole = [simulate(asynchronous(plan, n), workload, setting) for n in (807, 1500)]
    exact_s = (whole[1].end_s - whole[0].end_s) / 693
    busy_s = zip(*(run.busy_s for run in whole), strict=True)
    busy = [(b - a) / 693 / exact_s for a, b in busy_s]
    for minibatches in (1, 100, 1001):
        found = pace(workload, minibatches, setting)
        assert found.simulated >= max(minibatches, 1000), "not cut short"
        assert found.minibatch_s == pytest.approx(exact_s, rel=1e-3)
        assert found.busy == pytest.approx(busy, rel=1e-2)
