"""Which way replicas sum on which hosts."""

from __future__ import annotations

import pytest

from sparsepipe.schedule.sums import chain_load, direct_load, way_of


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
def test_the_way_that_loads_the_busiest_link_least(
    hosts: str, chain: int, direct: float, way: str
) -> None:
    assert chain_load(hosts) == chain
    assert direct_load(hosts) == pytest.approx(direct)
    assert way_of(hosts) == way


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
