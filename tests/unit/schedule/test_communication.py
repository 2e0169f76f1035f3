"""Which way replicas sum on which hosts."""

from __future__ import annotations

import pytest

from sparsepipe.schedule.communication import (
    CHUNK_BYTES,
    HOP_BYTES,
    chain_cost,
    chain_load,
    direct_load,
    way_of,
)

LARGE = 2**30


@pytest.mark.parametrize(
    ("hosts", "chain", "direct", "way"),
    [
        ("A", 0, 0, "direct"),
        ("AAA", 0, 0, "direct"),
        ("AB", 1, 1, "direct"),
        ("AAB", 1, 4 / 3, "chain"),
        ("AABB", 1, 2, "chain"),
        ("AAAABBB", 1, 24 / 7, "chain"),
        ("ABC", 2, 4 / 3, "direct"),  # the middle one sends both up and down
        ("AABBCC", 2, 8 / 3, "chain"),
        ("ABAB", 3, 2, "direct"),  # neighbours are on other hosts
        ("AABBAABB", 3, 4, "chain"),
    ],
)
def test_a_large_vector_takes_the_way_that_loads_the_busiest_link_least(
    hosts: str, chain: int, direct: float, way: str
) -> None:
    assert chain_load(hosts) == chain
    assert direct_load(hosts) == pytest.approx(direct)
    assert way_of(hosts, LARGE) == way


@pytest.mark.parametrize(
    ("hosts", "loads"), [("AAAABBB", (1, 24 / 7)), ("ABAB", (3, 2)), ("AABBCC", (2, 8 / 3))]
)
def test_loads_are_what_single_messages_come_to(hosts: str, loads: tuple[float, float]) -> None:
    """Counted message by message."""
    ranks = range(len(hosts))
    chain = [(a, a + 1, 1.0) for a in ranks[:-1]] + [(a + 1, a, 1.0) for a in ranks[:-1]]
    direct = [(a, b, 2 / len(hosts)) for a in ranks for b in ranks if a != b]
    for messages, load in zip((chain, direct), loads, strict=True):
        for end in (0, 1):
            of_host = {
                host: sum(m[2] for m in messages if hosts[m[end]] == host != hosts[m[1 - end]])
                for host in hosts
            }
            assert max(of_host.values()) == pytest.approx(load)


@pytest.mark.parametrize(
    ("hosts", "chunks", "hops"),
    [
        ("AAAABBB", 0, 10),  # 24/7 S + 2 h = 2 S + 12 h, of which S is less than C
        ("AABB", 1, 4),  # 2 S + 2 h = S + C + 6 h
        ("AAB", 1, 2),
        ("AABBCC", 2, 8),
    ],
)
def test_a_chain_begins_to_pay_at_one_size(hosts: str, chunks: int, hops: int) -> None:
    """Where what it sends less equals a chunk's way through it, and the hops it has more."""
    less = direct_load(hosts) - chain_load(hosts) - (chunks == 0)
    even = (chunks * CHUNK_BYTES + hops * HOP_BYTES) / less
    assert (even < CHUNK_BYTES) == (chunks == 0), "a vector shorter than C is one chunk"
    assert way_of(hosts, 0.999 * even) == "direct"
    assert way_of(hosts, 1.001 * even) == "chain"
    sizes = [2**exponent for exponent in range(40)]
    assert [way_of(hosts, size) for size in sizes] == [
        "direct" if size <= even else "chain" for size in sizes
    ]


@pytest.mark.parametrize("hosts", ["A", "AAA", "AB", "ABC", "ABAB"])
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, LARGE])
def test_where_a_chain_sends_no_less_no_size_takes_it(hosts: str, size: int) -> None:
    assert way_of(hosts, size) == "direct"


@pytest.mark.parametrize("hosts", ["AB", "AAB", "AAAABBB"])
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_a_chain_costs_what_its_chunks_take_one_after_another(hosts: str, chunks: int) -> None:
    """Played through: the one link carries a chunk at a time each way, in a turn; h for a hop."""
    came_down = 0
    for came_up in range(1, chunks + 1):
        came_down = max(came_up, came_down) + 1
    hops = 2 * (len(hosts) - 1)
    expected = came_down * CHUNK_BYTES + hops * HOP_BYTES
    assert chain_cost(hosts, chunks * CHUNK_BYTES) == expected
