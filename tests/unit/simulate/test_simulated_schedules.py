"""Schedules by name, in the long run and in the short."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

import pytest
from torch import nn

from sparsepipe.cluster import Link
from sparsepipe.errors import ConfigError, PlanError, ProfileError
from sparsepipe.profiling import LayerProfile, Profile
from sparsepipe.schedule import SYNCHRONOUS, WARMUPS
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import MICROBATCHES, SCHEDULES, Simulation
from sparsepipe.simulate.workload import Workload
from sparsepipe.strategies import SynchronousPipelineStrategy
from tests.support.plans import plan_of, plan_on


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("config", ["1-1-1", "2-1", "1-2-1"])
@pytest.mark.parametrize("minibatches", [5, 203, 204])
def test_a_long_run_ends_as_in_a_whole_simulation(
    schedule: str, config: str, minibatches: int
) -> None:
    plan = plan_of(config)
    workload = Workload.uniform(
        plan, scale=[1.0, 2.2, 1.7][: plan.num_stages], output_bytes=30.0, parameter_bytes=50.0
    )
    network = ClusterNetwork.flat(plan.num_ranks, Link(bytes_per_s=60.0, latency_s=0.1))
    simulation = Simulation.of(workload, Setting(network=network), schedule=schedule)
    found, whole = simulation.pace(minibatches), simulation.record(minibatches)
    assert found.minibatches == whole.minibatches == minibatches
    assert found.total_s == pytest.approx(whole.end_s, rel=1e-9)
    if minibatches > 200:
        assert found.simulated < minibatches
        ends_s = whole.returns_s
        measured_s = (ends_s[179] - ends_s[59]) / 120
        assert found.minibatch_s == pytest.approx(measured_s, rel=1e-9)
        each = zip(found.busy, whole.busy_s, strict=True)
        assert all(
            busy == pytest.approx(busy_s / minibatches / measured_s, rel=0.02)
            for busy, busy_s in each
        )


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("message_s", [0.0, 0.5, 1.4, 2.0])
def test_time_that_a_microbatch_spends_on_messages(
    schedule: str, stages: int, message_s: float
) -> None:
    """By 1F1B the first stage begins none before the gradient of an earlier one is back.

    That one, ``in_flight`` before, goes forward and backward in 1 s and 2 s a stage, and its
    messages there and back. By GPipe all go forward, and then all backward, as fast as stages or
    links are.
    """
    plan = plan_of("-".join("1" * stages))
    link = Link(bytes_per_s=float("inf"), latency_s=message_s)

    def minibatch_s(parts: int) -> float:
        made = Simulation.of(
            Workload.uniform(plan, scale=[parts] * stages, output_bytes=1.0),
            Setting(network=ClusterNetwork.flat(stages, link)),
            schedule=schedule,
            microbatches=parts,
        )
        return made.pace(1).total_s

    more = lcm(7, 8, 15)  # whole rounds of 2, 3, 4, 5, 7, 8 and 15 in flight
    each_s = (minibatch_s(60 + more) - minibatch_s(60)) / more
    if schedule == "gpipe":
        expected_s = max(1.0, message_s) + max(2.0, message_s)
    else:
        in_flight = WARMUPS[schedule] * (stages - 1) + 1
        back_s = 3.0 * stages + 2 * (stages - 1) * message_s
        expected_s = max(3.0, back_s / in_flight)
    assert each_s == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message", "remedy"),
    [
        ({"schedule": "gpip"}, "unknown schedule 'gpip'", "asynchronous, naive, gpipe, 1f1b"),
        ({"schedule": "naive", "microbatches": 1}, "=1 does not suit the schedule naive", "leave"),
    ],
)
def test_impossible_settings_are_refused(
    settings: dict[str, object], message: str, remedy: str
) -> None:
    setting = Setting(network=ClusterNetwork.flat(2))
    with pytest.raises(ConfigError, match=message) as caught:
        Simulation.of(Workload.uniform(plan_of("1-1")), setting, **settings)  # type: ignore[arg-type]
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize(("config", "stage"), [("5-1", 0), ("1-5-2", 1)])
def test_a_device_without_microbatches_is_refused_as_in_training(
    schedule: str, config: str, stage: int
) -> None:
    plan = plan_of(config)
    training = SynchronousPipelineStrategy(schedule=schedule, microbatches=MICROBATCHES)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=f"less than 5, the number of devices of stage {stage}"
    ) as trained:
        training.spans_of(plan, nn.Sequential())
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
    with pytest.raises(ConfigError) as simulated:
        Simulation.of(Workload.uniform(plan), setting, schedule=schedule)
    assert str(simulated.value) == str(trained.value)
    five = Simulation.of(Workload.uniform(plan), setting, schedule=schedule, microbatches=5)
    assert five.batches == plan.replicas(0)


def layer(index: int, **amounts: float) -> LayerProfile:
    return LayerProfile(index=index, name=f"layer {index}", kind="Linear", **amounts)


FAST = Profile(
    layers=(
        layer(0, forward_s=1, backward_s=2, activation_bytes=10, parameter_bytes=100,
              update_s=0.25, copy_s=0.5, saved_bytes=5, begin_bytes=3, end_bytes=1),
        layer(1, forward_s=3, backward_s=4, activation_bytes=20, parameter_bytes=200,
              update_s=0.5, copy_s=1.5, saved_bytes=7, begin_bytes=2, end_bytes=4),
        layer(2, forward_s=5, backward_s=6, activation_bytes=30, parameter_bytes=300,
              update_s=0.75, copy_s=2.5, saved_bytes=9, begin_bytes=6, end_bytes=8),
    ),
    meta={"batch_size": 8},
)  # fmt: skip
SLOW = Profile(
    layers=tuple(
        layer(
            each.index,
            forward_s=10 * each.forward_s,
            backward_s=10 * each.backward_s,
            activation_bytes=each.activation_bytes,
            parameter_bytes=each.parameter_bytes,
        )
        for each in FAST.layers
    )
)
MIXED = plan_on(["one/fast/0", "two/slow/0"], ["one/fast/1"], cuts=[2], num_layers=3)


def test_a_plan_costs_as_much_as_in_the_profiles_of_its_devices() -> None:
    first, second = Workload.of(MIXED, {"fast": FAST, "slow": SLOW}).stages
    assert first.forward_s == (4.0, 40.0)
    assert first.backward_s == (6.0, 60.0)
    assert first.update_s == first.copy_s == 0.0, "the slow device's profile does not tell"
    told = Workload.of(MIXED, {"fast": FAST, "slow": FAST}).stages
    assert [stage.update_s for stage in told] == [0.75, 0.75]
    assert [stage.copy_s for stage in told] == [2.0, 2.5]
    loading = {name: replace(FAST, meta={"load_s": s}) for name, s in (("fast", 3), ("slow", 7))}
    read = Workload.of(MIXED, loading).stages
    assert [stage.forward_s for stage in read] == [(7.0, 11.0), (5.0,)], "the first stage reads"
    half = Workload.of(MIXED, {**loading, "slow": FAST}).stages
    assert half[0].forward_s == (4.0, 4.0), "one profile does not have it"
    for mode, copies, keeps in (
        ("vertical_sync", [2.0, 2.5], True),
        ("none", [0.0, 0.0], False),
        ("spectrain", [0.0, 0.0], False),
    ):
        workload = Workload.of(MIXED, {"fast": FAST, "slow": FAST}, mode=mode)
        assert [stage.copy_s for stage in workload.stages] == copies
        assert workload.vertical_sync == keeps
    assert (first.output_bytes, first.gradient_bytes) == (20.0, 20.0)
    assert first.parameter_bytes == 300.0
    assert first.layers_backward_s == ((4.0, 2.0), (40.0, 20.0))
    assert first.layers_parameter_bytes == (200.0, 100.0)
    # Of each layer the most: SLOW does not tell what it saves, so that its inputs count, 0, 10, 20.
    assert first.stored_bytes == 5.0 + 10.0 + 3.0 + 4.0
    assert second.forward_s == (5.0,)
    assert second.output_bytes == 0.0
    assert second.stored_bytes == 20.0 + 6.0 + 8.0


def test_profiles_must_be_of_the_plan() -> None:
    with pytest.raises(ProfileError, match="no profile of slow") as caught:
        Workload.of(MIXED, {"fast": FAST})
    assert "task=profile" in caught.value.remedy
    short = Profile(layers=FAST.layers[:2])
    with pytest.raises(PlanError, match="covers 3 layers, but the profiles have 2"):
        Workload.of(MIXED, {"fast": short, "slow": short})
