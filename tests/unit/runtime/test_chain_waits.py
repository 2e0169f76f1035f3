"""No rank of a chain waits for ever, in whatever order ranks do their steps.

Both for sends that begin and wait for nothing, as the runtime's do, and for sends that last until
the other side expects the chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import product

import pytest

from sparsepipe.runtime.collectives.chain_sum import Act, Lane, lanes

Key = tuple[int, str]  # a rank's place, and which of its lanes
Node = tuple[Key, int]  # a step of a lane
State = tuple[int, ...]  # how many steps of each lane are done

RANKS, CHUNKS, ROOMS = range(2, 7), range(1, 6), range(1, 6)


def made(ranks: int, chunks: int, room: int) -> dict[Key, Lane]:
    """The lanes of all ranks."""
    both = [lanes(place, ranks=ranks, chunks=chunks, room=room) for place in range(ranks)]
    return {
        (p, way): lane for p, two in enumerate(both) for way, lane in zip("ud", two, strict=True)
    }


def sender(every: Mapping[Key, Lane], key: Key) -> Key:
    """The lane whose chunks a lane takes."""
    place = key[0]
    ends = (every[key].source, place)
    (found,) = [k for k, lane in every.items() if lane.steps and (k[0], lane.target) == ends]
    return found


def receiver(every: Mapping[Key, Lane], key: Key) -> Key:
    """The lane that takes a lane's chunks."""
    place = key[0]
    ends = (every[key].target, place)
    (found,) = [k for k, lane in every.items() if lane.steps and (k[0], lane.source) == ends]
    return found


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
        theirs = keys.index(sender(every, key))
        return [Needed(theirs, "send", nth), Needed(keys.index(key), "expect", nth)]
    if step.act == "send" and sends_wait:
        return [Needed(keys.index(receiver(every, key)), "expect", nth)]
    return []


def endings(every: Mapping[Key, Lane], *, sends_wait: bool) -> tuple[int, set[State]]:
    """How many states there are, and those after which nobody can go on."""
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
    *product([2], CHUNKS, ROOMS),
    *product([3], CHUNKS, [1, 2, 4]),
    *product([4], [1, 2, 3], [1, 2]),
    (5, 1, 1),
    (5, 2, 1),
    (6, 1, 1),
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


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_search_of_all_orders_finds_who_would_wait_for_ever(ranks: int) -> None:
    """Without room nothing is ever expected; so the tests here can fail."""
    every = made(ranks, 1, 0)
    _, ends = endings(every, sends_wait=False)
    assert all(end != tuple(len(lane.steps) for lane in every.values()) for end in ends)


# Larger chains. A step that can be done stays so, whatever others do: what it waits for has been
# done, and only its own lane takes from where it takes. So all end in every order if what each step
# waits for, and what that waits for in turn, leads nowhere back to it.


def waits(every: Mapping[Key, Lane], *, sends_wait: bool) -> dict[Node, set[Node]]:
    """Of each step, those that must be done before."""
    place_of = {
        (key, step.act, step.chunk): (key, at)
        for key, lane in every.items()
        for at, step in enumerate(lane.steps)
    }
    found: dict[Node, set[Node]] = {}
    for key, lane in every.items():
        for at, step in enumerate(lane.steps):
            needs = {(key, at - 1)} if at else set()
            if step.act == "take":
                needs.add(place_of[key, "expect", step.chunk])
                needs.add(place_of[sender(every, key), "send", step.chunk])
            if step.act == "send" and sends_wait:
                needs.add(place_of[receiver(every, key), "expect", step.chunk])
            found[key, at] = needs
    return found


@pytest.mark.parametrize("sends_wait", [False, True])
@pytest.mark.parametrize(("ranks", "chunks"), list(product(RANKS, CHUNKS)))
def test_no_step_waits_for_itself(ranks: int, chunks: int, sends_wait: bool) -> None:
    for room in ROOMS:
        every = made(ranks, chunks, room)
        order = [*TopologicalSorter(waits(every, sends_wait=sends_wait)).static_order()]
        assert len(order) == sum(len(lane.steps) for lane in every.values())


@pytest.mark.parametrize("sends_wait", [False, True])
@pytest.mark.parametrize(("ranks", "chunks"), list(product(RANKS, CHUNKS)))
def test_whoever_waits_does_so_for_an_earlier_hop(
    ranks: int, chunks: int, sends_wait: bool
) -> None:
    """The argument of the module: chunk c makes its q-th hop at 2 c + q."""
    for room in ROOMS:
        every = made(ranks, chunks, room)

        def time(
            node: Node, every: Mapping[Key, Lane] = every, rooms: tuple[int, int] = (room, chunks)
        ) -> float:
            (place, way), at = node
            step = every[node[0]].steps[at]
            hops, room = (place, rooms[0]) if way == "u" else (2 * ranks - 2 - place, rooms[1])
            if step.act == "expect":  # right after the chunk is taken that made room for it
                return 2 * (step.chunk - room) + hops + 0.25
            return 2 * step.chunk + hops + (0.5 if step.act == "send" else 0.0)

        for node, needs in waits(every, sends_wait=sends_wait).items():
            assert all(time(need) < time(node) for need in needs)


def test_waiting_in_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter(waits(made(3, 2, 0), sends_wait=False)).prepare()
