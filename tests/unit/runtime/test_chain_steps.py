"""What each rank of a chain does when, as literal tables, and that nobody waits for ever."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest

from sparsepipe.runtime.collectives.chain_sum import Lane, lanes


def text(lane: Lane) -> str:
    return " ".join(map(str, lane.steps))


def test_the_steps_of_a_chain_of_three() -> None:
    """e: may come; t: taken, and added on the way up; s: sent on."""
    table = [lanes(place, ranks=3, chunks=4, room=2) for place in range(3)]
    assert [(text(up), text(down)) for up, down in table] == [
        ("s0 s1 s2 s3", "e0 e1 e2 e3 t0 t1 t2 t3"),
        ("e0 e1 t0 e2 s0 t1 e3 s1 t2 s2 t3 s3", "e0 e1 e2 e3 t0 s0 t1 s1 t2 s2 t3 s3"),
        ("e0 e1 t0 e2 s0 t1 e3 s1 t2 s2 t3 s3", ""),
    ]
    assert [(up.source, up.target) for up, _ in table] == [(None, 1), (0, 2), (1, 1)]
    assert [(down.source, down.target) for _, down in table] == [(1, None), (2, 0), (None, 1)]
    assert all(up.adds and not down.adds for up, down in table)


def test_two_ranks_and_one_chunk() -> None:
    table = [lanes(place, ranks=2, chunks=1, room=4) for place in range(2)]
    assert [(text(up), text(down)) for up, down in table] == [("s0", "e0 t0"), ("e0 t0 s0", "")]


class Played:
    """All lanes of a chain, step by step; a message moves when its receiver expects it."""

    def __init__(self, ranks: int, chunks: int, room: int) -> None:
        self.ranks = ranks
        made = [lanes(place, ranks=ranks, chunks=chunks, room=room) for place in range(ranks)]
        self.lanes = {
            (p, way): lane for p, both in enumerate(made) for way, lane in enumerate(both)
        }
        self.at = dict.fromkeys(self.lanes, 0)
        self.values = {(p, c): (p,) for p in range(ranks) for c in range(chunks)}
        self.sent: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        self.expected: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.lying: dict[int, int] = defaultdict(int)
        self.room = room

    def step(self, key: tuple[int, int]) -> bool:
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
def test_all_get_the_sum_in_order_and_nobody_waits_for_ever(
    ranks: int, chunks: int, room: int, backwards: bool
) -> None:
    """Whoever goes first goes as far as it can."""
    played = Played(ranks, chunks, room)
    keys = sorted(played.lanes, reverse=backwards)
    while any(played.step(key) for key in keys):
        pass
    assert all(played.at[key] == len(lane.steps) for key, lane in played.lanes.items())
    assert not any(played.sent.values())
    assert not any(played.expected.values())
    assert set(played.values.values()) <= {tuple(range(ranks))}
    assert len(played.values) == ranks * chunks
