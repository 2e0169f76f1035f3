"""Real ranks on emulated hosts: what gloo uses, and what the limits do to it."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from sparsepipe.emulate import announce_hosts, emulated_hosts, enter_host, set_limits
from sparsepipe.emulate.ranks import _enter
from sparsepipe.errors import HardwareError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.ordered_sum import _host_number
from tests.support.namespace_cases import cluster, needs_namespaces
from tests.support.processes import run

BYTES_PER_S = 2e6  # so that a busy machine is still faster
SIZE = 4_000_000


def exchange(rank: int) -> dict[str, object]:
    """Ranks 0 and 1 share a host, rank 2 is on another one."""
    enter_host()
    process_group.join("gloo", timeout_s=60)
    found: dict[str, object] = {
        "own": os.environ["GLOO_SOCKET_IFNAME"],
        "sum": dist_sum(rank),
        "said": process_group.gather_objects(rank),
    }
    found["inside"] = least_seconds_to(1)
    found["across"] = seconds_to(2)
    if rank == 0:
        set_limits(lifted=True)
    process_group.gather_objects(0)
    found["lifted"] = least_seconds_to(2)
    process_group.gather_objects(0)
    if rank == 0:
        set_limits()
    process_group.gather_objects(0)
    found["set again"] = seconds_to(2)
    process_group.leave()
    return found


def dist_sum(rank: int) -> int:
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    return int(value)


def seconds_to(target: int) -> float:
    """How long a message from rank 0 takes, on rank 0."""
    process_group.gather_objects(0)
    begin_s = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(torch.zeros(SIZE // 4), target)
        dist.recv(torch.zeros(1), target)
    elif dist.get_rank() == target:
        dist.recv(torch.zeros(SIZE // 4), 0)
        dist.send(torch.zeros(1), 0)
    return time.perf_counter() - begin_s


def least_seconds_to(target: int) -> float:
    """Of several messages: a busy machine makes some of them late."""
    return min(seconds_to(target) for _ in range(5))


@needs_namespaces
def test_gloo_goes_over_the_limited_link_and_the_store_does_not() -> None:
    hosts = ["host0", "host0", "host1"]
    with emulated_hosts(cluster(bytes_per_s=BYTES_PER_S)) as layout, announce_hosts(layout, hosts):
        found = run(exchange, 3, join_group=False)
        due_s = (SIZE - layout.burst_bytes) / BYTES_PER_S
    assert [f["own"] for f in found] == ["data"] * 3
    assert [f["sum"] for f in found] == [6, 6, 6]
    assert [f["said"] for f in found] == [[0, 1, 2]] * 3
    # A busy machine makes messages later, never earlier.
    first = found[0]
    assert first["across"] >= due_s
    assert first["set again"] >= due_s
    assert first["inside"] < due_s
    assert first["lifted"] < due_s


def test_without_a_network_ranks_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    before = os.readlink("/proc/self/ns/net")
    enter_host()
    assert os.readlink("/proc/self/ns/net") == before
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"


def test_a_host_that_is_gone_is_named() -> None:
    with pytest.raises(HardwareError, match="sparsepipe-1-1-0-0: No such file") as caught:
        _enter("sparsepipe-1-1-0-0")
    assert "run the command again" in caught.value.remedy


def number_in(namespace: str) -> int:
    """The host's number as a rank there finds it."""
    found: list[int] = []

    def enter() -> None:
        _enter(namespace)  # this thread alone
        found.append(_host_number())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


@needs_namespaces
def test_each_namespace_is_another_host() -> None:
    with emulated_hosts(cluster(2)) as layout:
        a, b = (station.namespace for station in layout.stations)
        found = [number_in(a), number_in(b), _host_number()]
        assert len(set(found)) == 3
        assert number_in(a) == found[0]
