"""Simulated steps of domains over ranks, against sums by hand."""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import Plan, Stage
from sparsepipe.simulate.domains import DomainSteps, GradientSum, RankCosts
from sparsepipe.simulate.network import INSTANT, ClusterNetwork

COSTS = [
    RankCosts(encode_s=2, losses_s=0.5, backward_s=3, update_s=0.25, sent_bytes=100),
    RankCosts(encode_s=4, losses_s=0.5, backward_s=1, update_s=0.5, sent_bytes=200),
    RankCosts(encode_s=1, losses_s=0.5, backward_s=6, update_s=0.25, sent_bytes=50),
]


def steps(
    count: int,
    link: Link = INSTANT,
    *,
    shared_bytes: float = 0,
    private: tuple[GradientSum, ...] = (),
) -> DomainSteps:
    devices = tuple(f"host/core/{rank}" for rank in range(count))
    return DomainSteps(
        plan=Plan(stages=(Stage(layers=(0, 0), devices=devices),)),
        network=ClusterNetwork.flat(count, link),
        costs=tuple(COSTS[:count]),
        shared=GradientSum(ranks=tuple(range(count)), num_bytes=shared_bytes),
        private=private,
        algorithm="ring",
    )


def test_one_rank_does_all_in_turn() -> None:
    record = steps(1).record(4)
    assert record.end_s == 4 * 5.75
    assert record.busy_s == [23]
    assert not record.transfers
    assert not record.reductions


def test_without_a_link_ranks_wait_for_the_slowest_encoder_and_the_slowest_backward() -> None:
    """Codes are there at 4, gradients at 4 + 0.5 + 6; of the next step ranks begin by turns."""
    first, second = steps(3).record(1), steps(3).record(2)
    assert first.end_s == 10.5 + 0.5
    starts = [10.5 + each.update_s + each.encode_s for each in COSTS]
    assert second.end_s == max(starts) + 0.5 + 6 + 0.5
    assert steps(3).minibatch_s() == second.end_s - first.end_s


def test_messages_share_the_ports_of_those_who_send_and_get_them() -> None:
    """At 100 bytes a second: rank 1 sends 2 x 200; what rank 0 gets is 200 + 50."""
    link = Link(bytes_per_s=100, latency_s=0.125)
    record = steps(3, link).record(1)
    ends = {(each.rank, each.target): each.end for each in record.transfers}
    assert ends[1, 0] == 4 + max(400, 250) / 100 + 0.125
    assert ends[2, 0] == 1 + max(100, 250) / 100 + 0.125
    assert ends[0, 2] == 2 + max(200, 300) / 100 + 0.125
    begins = max(4, ends[0, 2], ends[1, 2])
    back = [span for span in record.spans if span.kind == "B" and span.rank == 2]
    assert [(span.start, span.end) for span in back] == [(begins, begins + 6.5)]


def test_sums_follow_the_last_backward_and_those_of_replicas_follow_them() -> None:
    link = Link(bytes_per_s=100, latency_s=0)
    private = (GradientSum(ranks=(1, 2), num_bytes=100),)
    record = steps(3, link, shared_bytes=300, private=private).record(1)
    shared, own = record.reductions
    assert shared.start == max(record.returns_s)
    assert shared.end - shared.start == pytest.approx(2 * 2 / 3 * 300 / 100)
    assert own.start == shared.end
    assert own.end - own.start == pytest.approx(1)
    updates = {span.rank: span.start for span in record.spans if span.kind == "U"}
    assert updates == {0: shared.end, 1: own.end, 2: own.end}
