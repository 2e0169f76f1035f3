"""Times between real ranks over gloo; delays are put in by hand, so that figures have an oracle."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from processes import outcomes, run
from transport_cases import complaint
from waiting import LONG_S

from sparsepipe.runtime.bandwidth import (
    Bench,
    Effort,
    Reduction,
    Sending,
    groups_of,
    pairs_of,
    time_pairs,
    time_reductions,
)
from sparsepipe.runtime.transport.wire import Wire

SIZES = [4096, 200_000]
DELAY_S = 0.3
EFFORT = Effort(repeats=3, warmups=0, most_s=30.0, timeout_s=LONG_S)


def delay(to_rank: int, least_bytes: int) -> None:
    """Whatever this rank sends there from now on waits, if it has a tensor as large as that."""
    send = Wire.send

    def late(self: Wire, packet: Any, made: Any) -> None:
        if self._line._other == to_rank and sum(map(torch.numel, packet.host)) >= least_bytes:
            time.sleep(DELAY_S)
        send(self, packet, made)

    Wire.send = late  # type: ignore[method-assign]


def asymmetric_rank(rank: int) -> list[Sending]:
    """Large messages from rank 2 to rank 1 are late, no others."""
    if rank == 2:
        delay(to_rank=1, least_bytes=SIZES[-1])
    bench = Bench(EFFORT)
    found = time_pairs(bench, pairs_of([0, 0, 0], all_up_to=8), SIZES)
    bench.close()
    return found


def test_only_the_slow_direction_of_the_slow_pair_is_slow() -> None:
    found = [sending for of_rank in run(asymmetric_rank, 3) for sending in of_rank]
    ways = {(s.source, s.target, s.size_bytes) for s in found if not s.both_ways}
    links = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert ways == {(*link, size) for link in links for size in SIZES}
    assert len(ways) == sum(not s.both_ways for s in found)
    both = {(s.source, s.target): s for s in found if s.both_ways}
    assert both.keys() == {(0, 1), (0, 2), (1, 2)}
    assert all(s.size_bytes == SIZES[-1] for s in both.values())
    slow = {(s.source, s.target, s.size_bytes, s.both_ways) for s in found if s.seconds >= DELAY_S}
    assert slow == {(2, 1, SIZES[-1], False), (1, 2, SIZES[-1], True)}
    for sending in found:
        assert sending.bytes_per_s == sending.size_bytes / sending.seconds > 0
        assert 0 < sending.latency_s < DELAY_S / 2
        assert sending.repeats == EFFORT.repeats


def short_rank(rank: int) -> tuple[list[Sending], list[Reduction]]:
    """There is no time for a second message."""
    bench = Bench(Effort(repeats=50, warmups=20, most_s=0.0, timeout_s=LONG_S))
    sendings = time_pairs(bench, [(0, 1)], SIZES)
    reductions = time_reductions(bench, groups_of([0, 0]), SIZES)
    bench.close()
    return sendings, reductions


def test_a_slow_link_is_timed_once_at_least() -> None:
    for sendings, reductions in run(short_rank, 2):
        assert [sending.repeats for sending in sendings] == [1] * len(sendings)
        assert [reduction.repeats for reduction in reductions] == [1] * len(reductions)


def sums_rank(rank: int) -> list[Reduction]:
    bench = Bench(EFFORT)
    found = time_reductions(bench, groups_of([0, 0, 1]), SIZES)
    bench.close()
    return found


def test_sums_are_timed_over_all_and_inside_hosts() -> None:
    first, *others = run(sums_rank, 3)
    assert others == [[], []]
    assert [(r.ranks, r.how, r.size_bytes) for r in first] == [
        (ranks, how, size)
        for ranks in ((0, 1, 2), (0, 1))
        for how in ("all_reduce", "replicas")
        for size in SIZES
    ]
    assert all(r.seconds > 0 and r.repeats == EFFORT.repeats for r in first)


def killed_rank(rank: int) -> None:
    """Rank 2 dies when it is to answer rank 0, while rank 1 waits for both."""
    send = Wire.send

    def die(self: Wire, packet: Any, made: Any) -> None:
        if (rank, self._line._other) == (2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, packet, made)

    Wire.send = die  # type: ignore[method-assign]
    time_pairs(Bench(EFFORT), pairs_of([0, 0, 0], all_up_to=8), SIZES)


def test_a_dead_rank_ends_the_others() -> None:
    found = outcomes(killed_rank, 3)
    assert found[2].exit_code == -signal.SIGKILL
    for outcome in found[:2]:
        told = complaint(outcome)
        assert "rank 2 is gone" in told
        assert "while timing the link of ranks 0 and 2" in told
        assert "checkpoint" not in outcome.error.remedy  # type: ignore[union-attr]
        assert outcome.ended_s < LONG_S / 2  # not at the limit


def stopped_rank(rank: int) -> None:
    bench = Bench(Effort(repeats=1, warmups=0, most_s=1.0, timeout_s=3.0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time_pairs(bench, [(0, 1)], SIZES)


def test_a_rank_that_stands_still_is_waited_for_as_long_as_the_limit() -> None:
    (outcome, _) = outcomes(stopped_rank, 2, awaited=[0])
    assert "rank 1" in complaint(outcome)
    assert outcome.ended_s < LONG_S / 2


@pytest.mark.parametrize(
    ("hosts", "limit", "pairs"),
    [
        ([0, 0], 8, [(0, 1)]),
        ([0, 1, 1], 3, [(0, 1), (0, 2), (1, 2)]),
        ([0, 0, 0, 0], 3, [(0, 1)]),
        ([0, 0, 0, 1, 1, 2], 5, [(0, 1), (0, 3), (0, 5), (3, 4), (3, 5)]),
        ([2, 1, 1, 2], 2, [(0, 1), (0, 3), (1, 2)]),
    ],
)
def test_pairs_are_all_or_one_for_each_link(
    hosts: list[int], limit: int, pairs: list[tuple[int, int]]
) -> None:
    assert pairs_of(hosts, all_up_to=limit) == pairs


def test_groups_are_all_ranks_and_the_hosts_that_have_several() -> None:
    assert groups_of([0, 0]) == [(0, 1)]
    assert groups_of([0, 1]) == [(0, 1)]
    assert groups_of([1, 0, 0, 1]) == [(0, 1, 2, 3), (1, 2), (0, 3)]
