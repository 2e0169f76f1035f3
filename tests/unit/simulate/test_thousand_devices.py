"""Runs of 1,024 devices and 10,000 minibatches against what can be worked out by hand.

How long they take is for benchmarks/simulate.py to say.
"""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Link
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.plots.timeline import lanes, some_ranks
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.memory import long_run_peaks_bytes
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import Simulation, pace
from sparsepipe.simulate.workload import Workload
from tests.support.plans import plan_of

RANKS, MINIBATCHES = 1024, 10_000
EXACT = 1e-12


def test_data_parallelism_over_128_hosts() -> None:
    """Computation, then a ring that crosses each host's link once each way; ten rounds of it."""
    inside = Link(bytes_per_s=1e6)
    network = ClusterNetwork(
        hosts=tuple(rank // 8 for rank in range(RANKS)),
        inside=(inside,) * 128,
        between=Link(bytes_per_s=10.0, latency_s=0.001),
    )
    workload = Workload.uniform(plan_of(str(RANKS)), parameter_bytes=80.0)
    found = pace(workload, MINIBATCHES, Setting(network=network, algorithm="ring"))
    sum_s = 2 * (RANKS - 1) / RANKS * 80.0 / 10.0 + 2 * (RANKS - 1) * 0.001
    assert found.minibatch_s == pytest.approx((3.0 + sum_s) / RANKS, rel=1e-9)
    assert found.total_s == pytest.approx(10 * (3.0 + sum_s), rel=1e-9)
    assert found.busy == pytest.approx([3.0 / (3.0 + sum_s)] * RANKS, rel=1e-9)
    assert found.simulated < MINIBATCHES


def test_a_pipeline_of_64_replicas_in_each_stage() -> None:
    """All are busy; a minibatch goes through 16 stages and back, and 64 come every 3 seconds."""
    plan = plan_of("-".join(["64"] * 16))
    setting = Setting(network=ClusterNetwork.flat(RANKS))
    found = pace(Workload.uniform(plan), MINIBATCHES, setting)
    assert found.minibatch_s == pytest.approx(3.0 / 64, rel=EXACT)
    assert found.busy == pytest.approx([1.0] * RANKS, rel=EXACT)
    rounds = -(-MINIBATCHES // 64)
    assert found.total_s == pytest.approx(3.0 * 16 + 3.0 * (rounds - 1), rel=EXACT)
    assert found.simulated < MINIBATCHES / 2


def test_peaks_of_memory_are_the_partitioners() -> None:
    plan = plan_of("1-" * 64 + "480-480")
    model = MemoryModel()
    workload = Workload.uniform(plan, parameter_bytes=10.0)
    found = long_run_peaks_bytes(
        Simulation.of(workload, Setting(network=ClusterNetwork.flat(RANKS))), model
    )
    for stage in (0, 1, 40, 63, 64, 65):
        expected = model.stage_bytes(
            10.0, 0.0, replicas=plan.replicas(stage), left=RANKS - plan.ranks_of(stage).start
        )
        assert {found[rank] for rank in plan.ranks_of(stage)} == {expected}


@pytest.mark.parametrize(
    ("replicas", "seen"),
    [
        ([3, 2], [0, 1, 2, 3, 4]),
        ([RANKS], list(range(8))),
        ([512, 512], [0, 1, 2, 3, 512, 513, 514, 515]),
        ([1] * 15, [0, 2, 4, 6, 8, 10, 12, 14]),
        ([7] * 8, [7 * stage for stage in range(8)]),
    ],
)
def test_some_ranks_are_drawn_for_all(replicas: list[int], seen: list[int]) -> None:
    plan = plan_of("-".join(map(str, replicas)))
    assert some_ranks(plan, 8) == seen
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
    record = Simulation.of(Workload.uniform(plan), setting).record(2)
    drawn = lanes(
        plan, record.all_spans, ranks=seen, names=[str(rank) for rank in range(plan.num_ranks)]
    )
    assert [name for name, _ in drawn] == [str(rank) for rank in seen]
