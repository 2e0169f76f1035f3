"""Bandwidths between devices, by hand: two hosts with different links."""

from __future__ import annotations

import pytest

from sparsepipe.partition.devices import SEVERAL, DeviceKind, DevicePool

INF = float("inf")
KINDS = (
    DeviceKind(name="A", host="fast", count=2),
    DeviceKind(name="B", host="slow", count=1),
    DeviceKind(name="C", host="fast", count=1),
    DeviceKind(name="D", host="slow", count=2),
)
FLEET = DevicePool(kinds=KINDS, inside={"fast": 8.0, "slow": 2.0}, between=4.0)


@pytest.mark.parametrize(
    ("counts", "host", "slowest"),
    [
        ((1, 0, 0, 0), 0, INF),  # one device has nobody to talk to
        ((0, 0, 0, 1), 1, INF),
        ((2, 0, 0, 0), 0, 8.0),
        ((1, 0, 1, 0), 0, 8.0),  # two kinds on one host
        ((0, 1, 0, 2), 1, 2.0),
        ((1, 1, 0, 0), SEVERAL, 4.0),  # one on each host: the link between hosts alone
        ((2, 1, 1, 0), SEVERAL, 4.0),
        ((1, 1, 0, 1), SEVERAL, 2.0),  # the slow host's own link counts as well
        ((2, 1, 1, 2), SEVERAL, 2.0),
    ],
)
def test_where_devices_are_and_their_slowest_link(
    counts: tuple[int, ...], host: int, slowest: float
) -> None:
    assert FLEET.host_of(counts) == host
    assert FLEET.sync_bytes_per_s(counts) == slowest


@pytest.mark.parametrize(
    ("host", "following", "speed"),
    [
        (0, 0, 8.0),
        (1, 1, 2.0),
        (0, 1, 4.0),
        (1, 0, 4.0),
        (SEVERAL, 0, 4.0),
        (1, SEVERAL, 4.0),
        (SEVERAL, SEVERAL, 4.0),  # on which hosts the two lie is not told
    ],
)
def test_the_link_between_two_stages(host: int, following: int, speed: float) -> None:
    assert FLEET.cut_bytes_per_s(host, following) == speed


@pytest.mark.parametrize(
    ("inside", "between", "uniform"),
    [
        ({"fast": 8.0, "slow": 2.0}, 4.0, False),
        ({"fast": 4.0, "slow": 4.0}, 4.0, True),
        ({"fast": 4.0, "slow": 4.0}, 2.0, False),
        ({"fast": 4.0, "slow": 2.0}, 4.0, False),
        ({"fast": 4.0, "slow": 2.0}, 2.0, False),
    ],
)
def test_one_bandwidth_for_all_is_known_as_such(
    inside: dict[str, float], between: float, uniform: bool
) -> None:
    assert DevicePool(kinds=KINDS, inside=inside, between=between).is_uniform is uniform


def test_alone_a_host_needs_no_link_to_others() -> None:
    alone = DevicePool(kinds=KINDS[:1], inside={"fast": 8.0}, between=INF)
    assert alone.is_uniform
    assert alone.cut_bytes_per_s(0, 0) == 8.0
    assert alone.sync_bytes_per_s((2,)) == 8.0
