"""Times between real ranks over gloo; delays are put in by hand, so that figures have an oracle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sparsepipe.runtime import bandwidth
from sparsepipe.runtime.bandwidth import (
    Benchmark,
    MessageTime,
    ReductionTime,
    TimingBudget,
    groups_of,
    pairs_of,
    time_pairs,
    time_reductions,
)
from sparsepipe.runtime.collectives.ordered_sum import OrderedSum
from sparsepipe.runtime.transport import Message, Network
from sparsepipe.runtime.transport.channel import Wire
from tests.support.processes import outcomes, run
from tests.support.transport_cases import complaint
from tests.support.waiting import LONG_S

SIZES = [4096, 200_000]
DELAY_S = 0.3
TICK_S = 0.001
EFFORT = TimingBudget(repeats=3, warmups=0, most_s=30.0, timeout_s=LONG_S)


def tell_time_by_messages(rank: int, late_s: Callable[[int, Any], float]) -> None:
    """From now on a message takes a tick, and what is put on top, and nothing else takes any time.

    Args:
        rank: this one.
        late_s: what is put on top, of a message to a rank with a tensor or None.
    """
    now_s = 0.0
    send, receive = Network.send, Network.receive

    def stamped(self: Network, kind: Any, to_rank: int, message: Message, **options: Any) -> None:
        comes_s = now_s + TICK_S + late_s(to_rank, message.tree)
        stamp = {**message.meta, "comes_s": comes_s}
        send(self, kind, to_rank, replace(message, meta=stamp), **options)

    def waited(self: Network, kind: Any, from_rank: int, *, minibatch: int) -> Message:
        nonlocal now_s
        message = receive(self, kind, from_rank, minibatch=minibatch)
        now_s = max(now_s, message.meta["comes_s"])
        return message

    Network.send, Network.receive = stamped, waited  # type: ignore[method-assign]
    bandwidth.time = SimpleNamespace(perf_counter=lambda: now_s)  # type: ignore[attr-defined]


def asymmetric_rank(rank: int) -> list[MessageTime]:
    """Large messages from rank 2 to rank 1 are late, no others."""

    def late_s(to_rank: int, tree: Any) -> float:
        large = tree is not None and tree.numel() >= SIZES[-1]
        return DELAY_S if large and (rank, to_rank) == (2, 1) else 0.0

    tell_time_by_messages(rank, late_s)
    bench = Benchmark(EFFORT)
    found = time_pairs(bench, pairs_of([0, 0, 0], all_up_to=8), SIZES)
    bench.close()
    return found


@pytest.mark.full
def test_only_the_slow_direction_of_the_slow_pair_is_slow() -> None:
    """By a clock that messages carry along, which tells what their way takes and nothing else."""
    found = [sending for of_rank in run(asymmetric_rank, 3) for sending in of_rank]
    ways = {(s.source, s.target, s.size_bytes) for s in found if not s.both_ways}
    links = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert ways == {(*link, size) for link in links for size in SIZES}
    assert len(ways) == sum(not s.both_ways for s in found)
    both = {(s.source, s.target): s for s in found if s.both_ways}
    assert both.keys() == {(0, 1), (0, 2), (1, 2)}
    assert all(s.size_bytes == SIZES[-1] for s in both.values())
    slow = {(2, 1, SIZES[-1], False), (1, 2, SIZES[-1], True)}
    for sending in found:
        what = (sending.source, sending.target, sending.size_bytes, sending.both_ways)
        assert sending.seconds == pytest.approx(2 * TICK_S + DELAY_S * (what in slow)), what
        assert sending.latency_s == pytest.approx(TICK_S)
        assert sending.bytes_per_s == sending.size_bytes / sending.seconds
        assert sending.repeats == EFFORT.repeats


def slow_sums_rank(rank: int) -> tuple[list[ReductionTime], int]:
    """Sums that take 0.1 s at least."""
    number, reduce = 0, OrderedSum.reduce

    def counted(total: OrderedSum) -> None:
        nonlocal number
        number += 1
        time.sleep(0.1)
        reduce(total)

    OrderedSum.reduce = counted  # type: ignore[method-assign]
    bench = Benchmark(TimingBudget(repeats=50, warmups=20, most_s=0.35, timeout_s=LONG_S))
    found = time_reductions(bench, groups_of([0, 0]), SIZES[:1])
    bench.close()
    return found, number


def test_warm_ups_keep_to_the_time_as_well() -> None:
    """What connects, what foretells, and no more than three others."""
    (found, first), (_, second) = run(slow_sums_rank, 2)
    assert first == second  # whatever each of them measures
    assert 1 <= first <= 2 + 3
    assert found[1].repeats == 1


@pytest.mark.parametrize(
    ("once_s", "expected"),
    [(0.01, (3, 10)), (0.1, (3, 7)), (0.24, (3, 1)), (0.3, (2, 1)), (0.6, (0, 1)), (9.0, (0, 1))],
)
def test_exchanges_are_repeated_within_the_time_budget(
    once_s: float, expected: tuple[int, int]
) -> None:
    effort = TimingBudget(repeats=10, warmups=3, most_s=1.0, timeout_s=LONG_S)
    assert effort.within(once_s) == expected


def sums_rank(rank: int) -> list[ReductionTime]:
    bench = Benchmark(EFFORT)
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
    begin = Wire.begin

    def die(self: Wire, packet: Any, **options: Any) -> Any:
        if (rank, self.line.other) == (2, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, packet, **options)

    Wire.begin = die  # type: ignore[method-assign]
    time_pairs(Benchmark(EFFORT), pairs_of([0, 0, 0], all_up_to=8), SIZES)


def test_a_dead_rank_ends_the_others() -> None:
    found = outcomes(killed_rank, 3)
    assert found[2].exit_code == -signal.SIGKILL
    for outcome in found[:2]:
        told = complaint(outcome)
        assert "rank 2 is gone" in told
        assert "while timing the link of ranks 0 and 2" in told
        assert "checkpoint" not in outcome.error.remedy  # type: ignore[union-attr]
        assert outcome.ended_s < LONG_S / 2  # not at the limit


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
