"""Runs drawn at random go as they are foretold, against a simulation of every minibatch."""

from __future__ import annotations

import random

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import asynchronous
from sparsepipe.simulate.engine import Record, Setting, simulate
from sparsepipe.simulate.network import AS_IN_TRAINING, ClusterNetwork, Sends
from sparsepipe.simulate.simulation import pace
from sparsepipe.simulate.workload import StageCosts, Workload
from tests.support.plans import plan_of
from tests.support.sending import FREELY

ALGORITHMS = ("ring", "direct", "chain", "ordered")
SENDS = (
    FREELY,
    FREELY,
    AS_IN_TRAINING,
    AS_IN_TRAINING,
    Sends(outbox=1),
    Sends(inbox=2),
    Sends(outbox=1, inbox=1),
    Sends(outbox=2, inbox=0),
)
BUCKETS = (None, None, 1.0, 40.0)
SEEDS = range(32)


def drawn_costs(draw: random.Random, replicas: int, *, alone: bool) -> StageCosts:
    """Of up to three layers, some of them without parameters, on unlike devices.

    A stage that is alone has some: its replicas have nothing else to do with one another.
    """
    layers = draw.randint(1, 3)
    parameters = tuple(draw.choice([0.0, draw.uniform(1.0, 40.0)]) for _ in range(layers))
    if alone and not sum(parameters):
        parameters = (5.0,) * layers
    backward_s = tuple(
        tuple(draw.uniform(0.5, 2.0) for _ in range(layers)) for _ in range(replicas)
    )
    return StageCosts(
        forward_s=tuple(draw.uniform(0.5, 2.0) for _ in range(replicas)),
        backward_s=tuple(map(sum, backward_s)),
        update_s=draw.choice([0.0, 0.3]),
        copy_s=draw.choice([0.0, 0.2]),
        output_bytes=draw.choice([0.0, draw.uniform(0.0, 60.0)]),
        gradient_bytes=draw.uniform(0.0, 60.0),
        parameter_bytes=sum(parameters),
        layers_backward_s=backward_s,
        layers_parameter_bytes=parameters,
    )


def drawn(seed: int) -> tuple[Workload, Setting]:
    """Unlike devices and stages on two or three hosts."""
    draw = random.Random(seed)
    replicas = [draw.choice([1, 1, 2, 3]) for _ in range(draw.randint(1, 4))]
    plan = plan_of("-".join(map(str, replicas)))
    inside = Link(bytes_per_s=200.0)
    network = ClusterNetwork(
        hosts=tuple(draw.choice([0, 1, 2]) for _ in range(plan.num_ranks)),
        inside=(inside,) * 3,
        between=Link(bytes_per_s=draw.choice([30.0, 90.0]), latency_s=draw.choice([0.0, 0.05])),
    )
    setting = Setting(
        network=network,
        sends=draw.choice(SENDS),
        algorithm=draw.choice(ALGORITHMS),  # type: ignore[arg-type]
        bucket_bytes=draw.choice(BUCKETS),
    )
    costs = tuple(drawn_costs(draw, count, alone=plan.num_stages == 1) for count in replicas)
    workload = Workload(plan=plan, stages=costs, vertical_sync=draw.random() < 0.3)
    return workload, setting


@pytest.mark.parametrize("seed", SEEDS)
def test_any_run_ends_when_predicted_and_has_the_pace_of_long_runs(seed: int) -> None:
    """Runs of some hundred minibatches, and short ones that say as much of how it would go on."""
    workload, setting = drawn(seed)
    minibatches = 390 + seed
    whole = simulate(asynchronous(workload.plan, minibatches), workload, setting)
    from_s, to_s = whole.returns_s[60], whole.returns_s[300]
    busy = busy_between(whole, from_s, to_s)
    few = random.Random(seed).randint(1, 40)
    short = simulate(asynchronous(workload.plan, few), workload, setting)
    for run in (whole, short):
        foretold = pace(workload, run.minibatches, setting)
        assert foretold.minibatches == run.minibatches
        assert foretold.total_s == pytest.approx(run.end_s, rel=1e-9)
        assert foretold.minibatch_s == pytest.approx((to_s - from_s) / 240, rel=0.02)
        assert foretold.busy == pytest.approx(busy, abs=0.03)


def busy_between(record: Record, from_s: float, to_s: float) -> list[float]:
    """Of each rank, the share of this time in which it computes."""
    busy_s = [0.0] * record.plan.num_ranks
    for span in record.spans:
        busy_s[span.rank] += max(0.0, min(span.end, to_s) - max(span.start, from_s))
    return [each_s / (to_s - from_s) for each_s in busy_s]


def test_the_draws_cover_what_they_should() -> None:
    runs = [drawn(seed) for seed in SEEDS]
    assert {setting.algorithm for _, setting in runs} == set(ALGORITHMS)
    assert {setting.sends for _, setting in runs} == set(SENDS)
    in_buckets = [
        workload.plan.config
        for workload, setting in runs
        if setting.bucket_bytes is not None and workload.plan.num_ranks > workload.plan.num_stages
    ]
    assert len(in_buckets) >= 8
    short = sum(pace(workload, 390, setting).simulated < 390 for workload, setting in runs)
    assert short >= 27, "most are not simulated to their end"
    assert 6 <= sum(workload.vertical_sync for workload, _ in runs) <= 16
