"""The simulator against what the papers' formulas say, exactly."""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Link
from sparsepipe.errors import PlanError, ScheduleError
from sparsepipe.schedule import Plan, asynchronous, gpipe, naive, one_f_one_b
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.simulation import pace
from sparsepipe.simulate.workload import StageCosts, Workload
from tests.support.plans import plan_of
from tests.support.sending import RENDEZVOUS

EXACT = 1e-12


def instant(plan: Plan) -> Setting:
    return Setting(network=ClusterNetwork.flat(plan.num_ranks))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("minibatches", [1, 5])
def test_naive_model_parallelism_runs_one_stage_at_a_time(stages: int, minibatches: int) -> None:
    plan = plan_of("-".join("1" * stages))
    record = simulate(naive(plan, minibatches), Workload.uniform(plan), instant(plan))
    assert record.end_s == pytest.approx(minibatches * stages * 3.0, rel=EXACT)
    assert record.busy_s == pytest.approx([minibatches * 3.0] * stages, rel=EXACT)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("k", "t"), [(1, 4), (2, 1), (2, 8), (4, 8), (8, 32)])
def test_the_bubble_of_a_flushed_pipeline(make, k: int, t: int) -> None:
    """(K - 1) / (T + K - 1): Huang et al., GPipe, section 2.3."""
    plan = plan_of("-".join("1" * k))
    workload = Workload.uniform(plan, forward_s=t, backward_s=2 * t).split(t)
    record = simulate(make(plan, 3, microbatches=t), workload, instant(plan))
    idle = 1 - sum(record.busy_s) / (k * record.end_s)
    assert idle == pytest.approx((k - 1) / (t + k - 1), rel=EXACT)


@pytest.mark.parametrize("scale", [[1, 1, 1, 1], [1, 3, 2, 1], [5, 1, 1, 1], [1, 1, 1, 4]])
def test_the_asynchronous_pipeline_goes_at_the_pace_of_its_slowest_stage(scale) -> None:
    plan = plan_of("1-1-1-1")
    found = pace(Workload.uniform(plan, scale=scale), 10_000, instant(plan))
    assert found.minibatch_s == pytest.approx(3.0 * max(scale), rel=EXACT)
    assert found.busy == pytest.approx([s / max(scale) for s in scale], rel=EXACT)


def test_the_hybrid_of_the_papers_fig_4() -> None:
    """3 devices, 2 stages; the first takes twice as long and has two replicas: all are busy."""
    plan = plan_of("2-1")
    found = pace(Workload.uniform(plan, scale=[2, 1]), 1000, instant(plan))
    assert found.minibatch_s == pytest.approx(3.0, rel=EXACT)
    assert found.busy == pytest.approx([1.0, 1.0, 1.0], rel=EXACT)


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    plan = plan_of("1-1")
    workload = Workload.uniform(plan, output_bytes=100.0)
    link = Link(bytes_per_s=50.0, latency_s=0.5)
    setting = Setting(network=ClusterNetwork.flat(2, link))
    record = simulate(naive(plan, 1), workload, setting)
    assert [(t.kind, t.start, t.end) for t in record.transfers] == [
        ("activation", 1.0, 3.5),
        ("gradient", 6.5, 9.0),
    ]
    assert record.end_s == 11.0


def test_on_a_slow_link_the_minibatches_in_flight_are_the_limit() -> None:
    """Two are on their way at a time, and each is back at stage 0 after 16 s."""
    plan = plan_of("1-1")
    workload = Workload.uniform(plan, output_bytes=100.0)
    slow = Setting(network=ClusterNetwork.flat(2, Link(bytes_per_s=20.0)))
    way_s = 1.0 + 5.0 + 3.0 + 5.0 + 2.0
    assert pace(workload, 1000, slow).minibatch_s == pytest.approx(way_s / 2, rel=1e-9)


def test_a_run_ends_with_its_last_action() -> None:
    """Whatever was foreseen: a message that gets the link to itself comes sooner than it seemed.

    Rank 1's message begins at 5 s beside rank 0's, of whose 100 bytes 60 are left: these come at
    17 s. Rank 1's would have come at 25 s then, and comes at 21 s.
    """
    plan = plan_of("2-1")
    costs = (
        StageCosts(forward_s=(1.0, 5.0), backward_s=(0.5, 0.5), output_bytes=100.0),
        StageCosts(forward_s=(0.5,), backward_s=(0.5,)),
    )
    setting = Setting(network=ClusterNetwork.flat(3, Link(bytes_per_s=10.0)))
    record = simulate(asynchronous(plan, 2), Workload(plan=plan, stages=costs), setting)
    came_s = [sent.end for sent in record.transfers if sent.kind == "activation"]
    assert came_s == pytest.approx([17.0, 21.0], rel=EXACT)
    assert record.end_s == pytest.approx(21.0 + 0.5 + 0.5 + 0.5, rel=EXACT)
    assert record.end_s == max(span.end for span in record.spans)


def test_a_rendezvous_holds_the_sender_until_its_message_has_come() -> None:
    plan = plan_of("1-1")
    workload = Workload.uniform(plan, output_bytes=100.0)
    network = ClusterNetwork.flat(2, Link(bytes_per_s=100.0))
    schedule = naive(plan, 3)
    met = simulate(schedule, workload, Setting(network=network, sends=RENDEZVOUS))
    assert met.end_s == pytest.approx(3 * (6.0 + 2.0), rel=EXACT)
    with pytest.raises(ScheduleError, match="rank 0 before B0, rank 1 before U0") as caught:
        simulate(asynchronous(plan, 2), workload, Setting(network=network, sends=RENDEZVOUS))
    assert "outbox" in caught.value.remedy, "each wants to send before it takes"


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_data_parallelism_on_one_host(algorithm, ranks: int) -> None:
    """Computation, then 2 (m - 1) / m of the gradients at each device's own ports."""
    plan = plan_of(str(ranks))
    workload = Workload.uniform(plan, parameter_bytes=80.0)
    setting = Setting(
        network=ClusterNetwork.flat(ranks, Link(bytes_per_s=10.0)), algorithm=algorithm
    )
    found = pace(workload, 40 * ranks, setting)
    round_s = 3.0 + 2 * (ranks - 1) / ranks * 80.0 / 10.0
    assert found.minibatch_s == pytest.approx(round_s / ranks, rel=1e-9)


@pytest.mark.parametrize(("algorithm", "crossing"), [("ring", 2 * 3 / 4), ("direct", 2 * 4 / 4)])
def test_sums_over_two_hosts_wait_for_the_link_between(algorithm, crossing: float) -> None:
    """Two ranks a host: a ring crosses once each way, parts for everyone 2 x 2 times a phase."""
    plan = plan_of("4")
    network = ClusterNetwork(
        hosts=(0, 0, 1, 1),
        inside=(Link(bytes_per_s=1e6), Link(bytes_per_s=1e6)),
        between=Link(bytes_per_s=10.0),
    )
    workload = Workload.uniform(plan, parameter_bytes=80.0)
    found = pace(workload, 400, Setting(network=network, algorithm=algorithm))
    assert found.minibatch_s == pytest.approx((3.0 + crossing * 80.0 / 10.0) / 4, rel=1e-9)


def test_sums_in_buckets_overlap_with_the_backward() -> None:
    """Two layers a second each back; the last one's gradient moves while the first is computed."""
    plan = plan_of("2")
    costs = StageCosts(
        forward_s=(1.0, 1.0),
        backward_s=(2.0, 2.0),
        parameter_bytes=60.0,
        layers_backward_s=((1.0, 1.0), (1.0, 1.0)),
        layers_parameter_bytes=(50.0, 10.0),
    )
    workload = Workload(plan=plan, stages=(costs,))
    network = ClusterNetwork.flat(2, Link(bytes_per_s=100.0))
    apart = pace(workload, 40, Setting(network=network, algorithm="ring"))
    assert apart.minibatch_s == pytest.approx((3.0 + 0.6) / 2, rel=1e-9)
    at_once = pace(workload, 40, Setting(network=network, algorithm="ring", bucket_bytes=1.0))
    assert at_once.minibatch_s == pytest.approx((3.0 + 0.1) / 2, rel=1e-9)


@pytest.mark.parametrize("layers_bytes", [(), (0.0, 0.0)])
@pytest.mark.parametrize("bucket_bytes", [None, 1.0])
def test_replicas_without_parameters_do_not_meet(
    layers_bytes: tuple[float, ...], bucket_bytes: float | None
) -> None:
    """As in training. Rank 0 takes 3 s and rank 1 takes 5 s, each at its own pace."""
    plan = plan_of("2")
    costs = StageCosts(
        forward_s=(1.0, 1.0),
        backward_s=(2.0, 4.0),
        layers_backward_s=((1.0, 1.0), (1.0, 3.0)) if layers_bytes else (),
        layers_parameter_bytes=layers_bytes,
    )
    workload = Workload(plan=plan, stages=(costs,))
    setting = Setting(
        network=ClusterNetwork.flat(2, Link(bytes_per_s=10.0)), bucket_bytes=bucket_bytes
    )
    record = simulate(asynchronous(plan, 40), workload, setting)
    ends_s = [max(span.end for span in record.spans if span.rank == rank) for rank in (0, 1)]
    assert ends_s == pytest.approx([20 * 3.0, 20 * 5.0], rel=EXACT)
    assert not record.reductions
    found = pace(workload, 40, setting)
    assert found.total_s == pytest.approx(20 * 5.0, rel=EXACT)
    assert found.minibatch_s == pytest.approx(5.0 / 2, rel=1e-3), "the slower one's"
    assert found.busy == pytest.approx([3.0 / 5.0, 1.0], rel=1e-3)


@pytest.mark.parametrize(
    "known",
    [
        {"layers_parameter_bytes": (40.0, 40.0)},
        {"layers_parameter_bytes": (50.0, 10.0), "layers_backward_s": ((1.0, 1.0),) * 2},
    ],
)
def test_sums_in_buckets_need_the_layers(known: dict[str, object]) -> None:
    costs = StageCosts(forward_s=(1.0,) * 2, backward_s=(2.0,) * 2, parameter_bytes=80.0, **known)  # type: ignore[arg-type]
    workload = Workload(plan=plan_of("2"), stages=(costs,))
    setting = Setting(network=ClusterNetwork.flat(2), bucket_bytes=1.0)
    with pytest.raises(PlanError, match="bytes, and the seconds") as caught:
        pace(workload, 40, setting)
    assert "leave bucket_bytes out" in caught.value.remedy
