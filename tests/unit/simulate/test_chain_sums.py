"""Simulated sums over replicas in a chain, and which way replicas take, against closed forms."""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Link
from sparsepipe.schedule import Plan
from sparsepipe.schedule.communication import CHUNK_BYTES as CHUNK
from sparsepipe.schedule.communication import way_of
from sparsepipe.simulate.engine import Setting
from sparsepipe.simulate.network import ClusterNetwork, reduction_legs
from sparsepipe.simulate.simulation import pace
from sparsepipe.simulate.workload import Workload

SIZE = 80e6
FAST, SLOW = 1e15, 10e6


def sum_s(network: ClusterNetwork, algorithm: str, size: float = SIZE) -> float:
    """What a sum takes of data parallelism without overlap, beside the computation's 3 s."""
    ranks = len(network.hosts)
    plan = Plan.of(config=str(ranks), cuts=(), num_layers=1)
    workload = Workload.uniform(plan, parameter_bytes=size)
    setting = Setting(network=network, algorithm=algorithm)  # type: ignore[arg-type]
    return ranks * pace(workload, 40 * ranks, setting).minibatch_s - 3.0


def over_hosts(hosts: str, latency_s: float = 0.0) -> ClusterNetwork:
    numbers = tuple(ord(host) - ord("A") for host in hosts)
    return ClusterNetwork(
        hosts=numbers,
        inside=(Link(bytes_per_s=FAST),) * (max(numbers) + 1),
        between=Link(bytes_per_s=SLOW, latency_s=latency_s),
    )


@pytest.mark.parametrize(
    ("hosts", "vectors", "hops"),
    [
        ("AB", 1, 2),
        ("AABB", 1, 2),
        ("AAAABBB", 1, 2),
        ("ABC", 2, 4),  # the middle one sends up and down
        ("ABAB", 3, 6),  # each host's link carries three pairs
    ],
)
def test_a_chain_sends_the_vector_over_a_link_once_for_each_pair_of_neighbours(
    hosts: str, vectors: int, hops: int
) -> None:
    """Beside it a chunk's way there and back, but for its time at the busiest host."""
    expected_s = vectors * SIZE / SLOW + (hops - vectors) * CHUNK / SLOW + hops * 0.05
    assert sum_s(over_hosts(hosts, 0.05), "chain") == pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize(("ranks", "vectors"), [(2, 1), (3, 2), (8, 2)])
def test_a_chain_on_one_host(ranks: int, vectors: int) -> None:
    """Who has two neighbours sends to both."""
    network = ClusterNetwork.flat(ranks, Link(bytes_per_s=SLOW, latency_s=0.01))
    hops = 2 * (ranks - 1)
    expected_s = vectors * SIZE / SLOW + (hops - vectors) * CHUNK / SLOW + hops * 0.01
    assert sum_s(network, "chain") == pytest.approx(expected_s, rel=1e-6)


def test_a_vector_of_one_chunk_goes_hop_by_hop() -> None:
    network = ClusterNetwork.flat(4, Link(bytes_per_s=SLOW))
    size = 5e4
    assert size < CHUNK
    assert sum_s(network, "chain", size) == pytest.approx(6 * size / SLOW, rel=1e-6)


@pytest.mark.parametrize(
    ("hosts", "same"),
    [("A", "direct"), ("AA", "direct"), ("AB", "direct"), ("AAAABBB", "chain"), ("AAB", "chain"),
     ("ABC", "direct"), ("ABAB", "direct")],
)  # fmt: skip
def test_replicas_take_the_way_that_the_runtime_does(hosts: str, same: str) -> None:
    network = over_hosts(hosts)
    ranks = range(len(hosts))
    found = reduction_legs(network, ranks, SIZE, "ordered")
    assert found == reduction_legs(network, ranks, SIZE, same)  # type: ignore[arg-type]
    assert Setting(network=network).algorithm == "ordered"


@pytest.mark.parametrize(("size", "same"), [(2**19, "direct"), (2**22, "chain")])
def test_replicas_of_few_parameters_sum_directly(size: float, same: str) -> None:
    """As the runtime does: what a chain sends less does not make up for its hops."""
    network = over_hosts("AAAABBB")
    found = reduction_legs(network, range(7), size, "ordered")
    assert found == reduction_legs(network, range(7), size, same)  # type: ignore[arg-type]
    assert way_of("AAAABBB", size) == same


def test_seven_replicas_on_two_hosts_wait_less_than_for_a_ring() -> None:
    """The paper's 4 and 3: P in a chain, 12/7 P in a ring, 24/7 P each to each."""
    network = over_hosts("AAAABBB")
    found = [sum_s(network, way) * SLOW / SIZE for way in ("ordered", "ring", "direct")]
    assert found == pytest.approx([1 + CHUNK / SIZE, 12 / 7, 24 / 7], rel=1e-6)
