"""Sums along a chain of ranks: their steps, waits, and ranks that fail amid one."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparsepipe.runtime.collectives.ordered_sum import Act, Lane, OrderedSum, lanes
from sparsepipe.runtime.failures.missing_ranks import collective, new_group
from tests.support.processes import outcomes
from tests.support.transport_cases import complaint
from tests.support.waiting import LONG_S, shorten_limit

Key = tuple[int, str]  # a rank's place, and which of its lanes
State = tuple[int, ...]  # how many steps of each lane are done


def made(ranks: int, chunks: int, room: int) -> dict[Key, Lane]:
    """The lanes of all ranks."""
    both = [lanes(place, ranks=ranks, chunks=chunks, room=room) for place in range(ranks)]
    return {
        (p, way): lane for p, two in enumerate(both) for way, lane in zip("ud", two, strict=True)
    }


class Played:
    """All lanes of a chain, step by step; a message moves when its receiver expects it."""

    def __init__(self, ranks: int, chunks: int, room: int) -> None:
        self.lanes = made(ranks, chunks, room)
        self.at = dict.fromkeys(self.lanes, 0)
        self.values = {(p, c): (p,) for p in range(ranks) for c in range(chunks)}
        self.sent: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        self.expected: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.lying: dict[int, int] = defaultdict(int)
        self.room = room

    def step(self, key: Key) -> bool:
        """Does the next step of a lane, if it need not wait."""
        place, _ = key
        lane, at = self.lanes[key], self.at[key]
        if at == len(lane.steps):
            return False
        step = lane.steps[at]
        if step.act == "send":
            assert lane.target is not None
            self.sent[place, lane.target].append((step.chunk, self.values[place, step.chunk]))
        elif step.act == "expect":
            assert lane.source is not None
            self.expected[lane.source, place].append(step.chunk)
            self.lying[place] += lane.adds
            assert self.lying[place] <= self.room
        else:
            assert lane.source is not None
            way = lane.source, place
            if not self.sent[way]:
                return False
            chunk, value = self.sent[way].pop(0)
            assert self.expected[way].pop(0) == chunk == step.chunk, "messages come in order"
            own = self.values[place, chunk]
            self.values[place, chunk] = value + own if lane.adds else value
            self.lying[place] -= lane.adds
        self.at[key] += 1
        return True


@pytest.mark.parametrize(
    ("ranks", "chunks", "room"), list(product([2, 3, 5, 8], [0, 1, 2, 3, 9, 40], [1, 2, 4]))
)
@pytest.mark.parametrize("backwards", [False, True])
def test_all_get_the_sum_in_order_and_none_waits_for_ever(
    ranks: int, chunks: int, room: int, backwards: bool
) -> None:
    """Whoever goes first goes as far as it can."""
    played = Played(ranks, chunks, room)
    keys = [*reversed(played.lanes)] if backwards else [*played.lanes]
    while any(played.step(key) for key in keys):
        pass
    assert all(played.at[key] == len(lane.steps) for key, lane in played.lanes.items())
    assert not any(played.sent.values())
    assert not any(played.expected.values())
    assert set(played.values.values()) <= {tuple(range(ranks))}
    assert len(played.values) == ranks * chunks


def partner(every: Mapping[Key, Lane], key: Key, own: str, its: str) -> int:
    """The index of the lane whose chunks a lane takes ("source", "target"), or the reverse."""
    ends = (getattr(every[key], own), key[0])
    return next(
        n for n, (k, e) in enumerate(every.items()) if e.steps and (k[0], getattr(e, its)) == ends
    )


# Every order of steps, on small chains.


@dataclass(frozen=True)
class Needed:
    """What a step needs of a lane: that it has done so many steps of a kind."""

    lane: int
    act: Act
    count: int


def needed(every: Mapping[Key, Lane], key: Key, at: int, *, sends_wait: bool) -> list[Needed]:
    """By a step, of other steps than the one before."""
    keys, step = list(every), every[key].steps[at]
    nth = sum(earlier.act == step.act for earlier in every[key].steps[: at + 1])
    if step.act == "take":
        theirs = partner(every, key, "source", "target")
        return [Needed(theirs, "send", nth), Needed(keys.index(key), "expect", nth)]
    if step.act == "send" and sends_wait:
        return [Needed(partner(every, key, "target", "source"), "expect", nth)]
    return []


def endings(every: Mapping[Key, Lane], *, sends_wait: bool) -> tuple[int, set[State]]:
    """The number of states, and those after which no rank can go on."""
    steps = [
        [needed(every, key, at, sends_wait=sends_wait) for at in range(len(lane.steps))]
        for key, lane in every.items()
    ]
    done = [
        [Counter(step.act for step in lane.steps[:at]) for at in range(len(lane.steps) + 1)]
        for lane in every.values()
    ]
    start: State = (0,) * len(every)
    seen, left, ends = {start}, [start], set()
    while left:
        state = left.pop()
        possible = [
            n
            for n, at in enumerate(state)
            if at < len(steps[n])
            and all(done[m.lane][state[m.lane]][m.act] >= m.count for m in steps[n][at])
        ]
        if not possible:
            ends.add(state)
        for n in possible:
            following = (*state[:n], state[n] + 1, *state[n + 1 :])
            if following not in seen:
                seen.add(following)
                left.append(following)
    return len(seen), ends


SMALL = [
    *product([2], range(1, 6), range(1, 6)),
    *product([3], range(1, 6), [1, 2, 4]),
    *product([4], [1, 2, 3], [1, 2]),
    *((5, 1, 1), (5, 2, 1), (6, 1, 1)),
]


@pytest.mark.parametrize("sends_wait", [False, True])
@pytest.mark.parametrize(("ranks", "chunks", "room"), SMALL)
def test_all_end_in_every_order_of_their_steps(
    ranks: int, chunks: int, room: int, sends_wait: bool
) -> None:
    every = made(ranks, chunks, room)
    states, ends = endings(every, sends_wait=sends_wait)
    assert ends == {tuple(len(lane.steps) for lane in every.values())}
    assert states > max(len(lane.steps) for lane in every.values()), "there is more than one order"


CHUNK = 1000
CHUNKS = 40
AMID = 12


def when(number: int, do: Callable[[], None]) -> None:
    """Does something when this rank is to send its ``number``-th chunk from now on."""
    isend, sent = dist.isend, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == number:
            do()
        return isend(*args, **kwargs)

    dist.isend = counted  # type: ignore[assignment]


def chain_rank(rank: int, ranks: int, ends: int, signum: int, limit_s: float) -> None:
    group = new_group(list(range(ranks)), backend="gloo", timeout_s=LONG_S)
    total = OrderedSum(
        group,
        length=CHUNKS * CHUNK,
        dtype=torch.float32,
        device=torch.device("cpu"),
        way="chain",
        chunk=CHUNK,
    )
    with collective("a first sum", group):
        total.reduce()
    shorten_limit(limit_s, group)
    if rank == ends:
        when(AMID, lambda: os.kill(os.getpid(), signum))
    with collective("a sum", group):
        total.reduce()


@pytest.mark.parametrize("ends", [0, 2, 4])
def test_a_killed_rank_is_named_by_all_at_once(ends: int) -> None:
    others = [rank for rank in range(5) if rank != ends]
    found = outcomes(chain_rank, 5, 5, ends, signal.SIGKILL, LONG_S, awaited=others)
    for rank in others:
        text = complaint(found[rank])
        assert text == f"rank {ends} is gone: its connection to rank {rank} broke during a sum"
        assert found[rank].ended_s < 40  # not at the limit


@pytest.mark.parametrize(
    "ends", [2, *(pytest.param(rank, marks=pytest.mark.full) for rank in (0, 4))]
)
def test_a_stopped_rank_is_named_by_all_at_the_limit(ends: int) -> None:
    """Who gives up first breaks the others' connections: these may say that it is gone."""
    others = [rank for rank in range(5) if rank != ends]
    found = outcomes(chain_rank, 5, 5, ends, signal.SIGSTOP, 3.0, awaited=others)
    told = [complaint(found[rank]) for rank in others]
    assert all(text.startswith(f"rank {ends} ") for text in told), told
    assert any("did not take part in a sum with rank" in text for text in told)
    for rank in others:
        assert found[rank].ended_s < 40
