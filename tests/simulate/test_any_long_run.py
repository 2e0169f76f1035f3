"""Runs drawn at random end when they are foretold, against a simulation of every minibatch."""

from __future__ import annotations

import random

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import Plan, asynchronous
from sparsepipe.simulate.links import Sends
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.run import Setting, simulate
from sparsepipe.simulate.steady import pace
from sparsepipe.simulate.workload import StageCosts, Workload

ALGORITHMS = ("ring", "direct", "chain", "ordered")
SENDS = (
    Sends(),
    Sends(),
    Sends(outbox=1),
    Sends(inbox=1),
    Sends(outbox=1, inbox=1),
    Sends(outbox=2, inbox=0),
)
BUCKETS = (None, None, 1.0, 40.0)
SEEDS = range(32)


def drawn_costs(draw: random.Random, replicas: int) -> StageCosts:
    """Of up to three layers, some of them without parameters, on unlike devices."""
    layers = draw.randint(1, 3)
    parameters = tuple(draw.choice([0.0, draw.uniform(1.0, 40.0)]) for _ in range(layers))
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
    config, stages = "-".join(map(str, replicas)), len(replicas)
    plan = Plan.of(config=config, cuts=range(1, stages), num_layers=stages)
    inside = Link(bytes_per_s=200.0)
    network = Network(
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
    costs = tuple(drawn_costs(draw, count) for count in replicas)
    return Workload(plan=plan, stages=costs), setting


@pytest.mark.parametrize("seed", SEEDS)
def test_any_long_run_ends_when_it_is_foretold(seed: int) -> None:
    workload, setting = drawn(seed)
    minibatches = 390 + seed
    foretold = pace(workload, minibatches, setting)
    whole = simulate(asynchronous(workload.plan, minibatches), workload, setting)
    assert foretold.minibatches == whole.minibatches == minibatches
    assert foretold.total_s == pytest.approx(whole.end_s, rel=1e-9)
    middle_s = whole.returns_s[300] - whole.returns_s[60]
    assert foretold.minibatch_s == pytest.approx(middle_s / 240, rel=0.02)


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
    assert short >= 28, "most are not simulated to their end"
