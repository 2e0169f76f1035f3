"""When a run is said to repeat itself, and that it then does."""

from __future__ import annotations

import random

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import Intake, Plan, asynchronous
from sparsepipe.simulate.network import Network
from sparsepipe.simulate.run import Setting, simulate
from sparsepipe.simulate.standing import Lookout, Standing, cycle_of
from sparsepipe.simulate.steady import pace
from sparsepipe.simulate.workload import StageCosts, Workload


@pytest.mark.parametrize(
    ("ends_s", "cycle"),
    [
        ([1, 2, 3], 1),
        ([1, 2], None),
        ([0, 1, 3, 4, 6, 7, 9], 2),
        ([0, 5, 6, 8, 9, 11, 12], 2),  # not from the beginning on
        ([0, 1, 2, 3, 3.5], None),
        ([0, 1, 3, 6, 10, 15], None),
        ([5, 5, 5], 1),
    ],
)
def test_when_times_seem_to_repeat(ends_s: list[float], cycle: int | None) -> None:
    assert cycle_of(ends_s) == cycle


def seen(number: int, place: object, *, time_s: float, end_s: float = 0.5) -> Standing:
    return Standing(number, time_s, (place,), (end_s,), (time_s / 2, time_s))


def test_a_cycle_is_found_when_all_stands_as_before_and_cuts_the_run_short() -> None:
    intake = Intake(1000)
    lookout = Lookout(intake, 2)
    intake.told = 13
    wanted = []
    for number in range(9):
        if lookout.wants(number, 0.5 * number):
            wanted.append(number)
            lookout.sees(seen(number, "as ever", time_s=0.5 * number))
    assert wanted == [4, 6], "after three periods, and one later"
    assert lookout.cycle is not None
    assert (lookout.cycle.minibatches, lookout.cycle.seconds) == (2, 1.0)
    assert lookout.cycle.busy == (0.5, 1.0)
    assert intake.limit == 14, "what is known of by now, and as even as 1000"


def test_times_that_repeat_are_no_cycle_while_something_else_changes() -> None:
    intake = Intake(1000)
    lookout = Lookout(intake, 1)
    for number in range(40):
        if lookout.wants(number, float(number)):
            filling = min(number, 20)
            lookout.sees(seen(number, ("in the queue", filling), time_s=float(number)))
        assert lookout.cycle is None or number > 20
    assert lookout.cycle is not None
    assert intake.limit == 0


def test_what_ends_at_another_time_is_no_cycle() -> None:
    first = seen(4, "as ever", time_s=2.0)
    assert seen(6, "as ever", time_s=3.0).repeats(first)
    assert not seen(6, "as ever", time_s=3.0, end_s=0.5001).repeats(first)
    assert not seen(6, "elsewhere", time_s=3.0).repeats(first)


@pytest.mark.parametrize("seed", range(12))
def test_any_long_run_ends_when_it_is_foretold(seed: int) -> None:
    """Unlike devices and stages on two hosts, against a simulation of every minibatch."""
    draw = random.Random(seed)
    replicas = [draw.choice([1, 1, 2, 3]) for _ in range(draw.randint(1, 4))]
    config, stages = "-".join(map(str, replicas)), len(replicas)
    plan = Plan.of(config=config, cuts=range(1, stages), num_layers=stages)
    costs = tuple(
        StageCosts(
            forward_s=tuple(draw.uniform(0.5, 2.0) for _ in range(count)),
            backward_s=tuple(draw.uniform(1.0, 4.0) for _ in range(count)),
            update_s=draw.choice([0.0, 0.3]),
            copy_s=draw.choice([0.0, 0.2]),
            output_bytes=draw.uniform(0.0, 60.0),
            gradient_bytes=draw.uniform(0.0, 60.0),
            parameter_bytes=draw.uniform(0.0, 80.0),
        )
        for count in replicas
    )
    inside = Link(bytes_per_s=200.0)
    network = Network(
        hosts=tuple(draw.choice([0, 1]) for _ in range(plan.num_ranks)),
        inside=(inside, inside),
        between=Link(bytes_per_s=draw.choice([30.0, 90.0]), latency_s=0.05),
    )
    setting = Setting(network=network, algorithm=draw.choice(["ring", "direct"]))
    workload = Workload(plan=plan, stages=costs)
    minibatches = draw.randint(390, 410)
    foretold = pace(workload, minibatches, setting)
    whole = simulate(asynchronous(plan, minibatches), workload, setting)
    assert foretold.minibatches == whole.minibatches == minibatches
    assert foretold.total_s == pytest.approx(whole.end_s, rel=1e-9)
