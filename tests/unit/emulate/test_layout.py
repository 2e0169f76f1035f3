"""The network of hosts as data, against commands written out by hand."""

from __future__ import annotations

import pytest

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.emulate.layout import (
    BLOCKS,
    Layout,
    Owner,
    free_block,
    lay_out,
    leftovers,
    limiting,
    making,
    owners,
)
from sparsepipe.errors import HardwareError

OWNER = Owner(pid=4194304, started=123456789)


def inventory(hosts: int, *, bytes_per_s: float | None = 125e6) -> Inventory:
    return Inventory(
        hosts=tuple(
            Host(name=f"server{k}", devices=(Device(name="GPU", count=1),)) for k in range(hosts)
        ),
        link=None if bytes_per_s is None else Link(bytes_per_s=bytes_per_s),
    )


def laid_out(hosts: int = 2, *, time_scale: float = 10.0, block: int = 3) -> Layout:
    return lay_out(inventory(hosts), owner=OWNER, block=block, time_scale=time_scale)


def test_two_hosts_written_out() -> None:
    a, b, s = (f"sparsepipe-4194304-123456789-3-{end}" for end in ("0", "1", "switch"))
    bucket = "root tbf rate 100000000bit burst 115536 limit 4309840"
    expected = f"""
        ip netns add {s}
        ip -n {s} link add name switch type bridge
        ip -n {s} link set switch up
        ip netns add {a}
        ip -n {a} link set lo up
        ip -n {s} link add name port0 mtu 9000 type veth peer name data mtu 9000 netns {a}
        ip -n {s} link set port0 master switch
        tc -n {a} qdisc replace dev data {bucket}
        tc -n {s} qdisc replace dev port0 {bucket}
        ip -n {a} addr add 10.77.0.1/24 dev data
        ip -n {s} link set port0 up
        ip -n {a} link set data up
        ip link add name spe4194304c0 type veth peer name control netns {a}
        ip addr add 198.18.3.1 peer 198.18.3.2/32 dev spe4194304c0
        ip -n {a} addr add 198.18.3.2 peer 198.18.3.1/32 dev control
        ip link set spe4194304c0 up
        ip -n {a} link set control up
        ip netns add {b}
        ip -n {b} link set lo up
        ip -n {s} link add name port1 mtu 9000 type veth peer name data mtu 9000 netns {b}
        ip -n {s} link set port1 master switch
        tc -n {b} qdisc replace dev data {bucket}
        tc -n {s} qdisc replace dev port1 {bucket}
        ip -n {b} addr add 10.77.0.2/24 dev data
        ip -n {s} link set port1 up
        ip -n {b} link set data up
        ip link add name spe4194304c1 type veth peer name control netns {b}
        ip addr add 198.18.3.1 peer 198.18.3.6/32 dev spe4194304c1
        ip -n {b} addr add 198.18.3.6 peer 198.18.3.1/32 dev control
        ip link set spe4194304c1 up
        ip -n {b} link set control up
    """
    assert [" ".join(command) for command in making(laid_out())] == [
        line.strip() for line in expected.strip().splitlines()
    ]


def test_limits_are_lifted_and_set_at_both_ends_of_each_link() -> None:
    layout = laid_out()
    a, b, s = layout.namespaces
    ends = [(a, "data"), (s, "port0"), (b, "data"), (s, "port1")]
    assert [" ".join(command) for command in limiting(layout, lifted=True)] == [
        f"tc -n {namespace} qdisc replace dev {interface} root noqueue"
        for namespace, interface in ends
    ]
    assert limiting(layout) == [command for command in making(layout) if command[0] == "tc"]


def test_clusters_of_one_machine_have_nothing_in_common() -> None:
    most = [laid_out(63, block=block) for block in (0, 1, 511)]
    addresses = [a for layout in most for s in layout.stations for a in (s.control, s.launcher)]
    assert len(set(addresses)) == 3 * (63 + 1), "a launcher listens on one address"
    assert addresses[-2:] == ["198.19.255.250", "198.19.255.1"]
    names = [name for layout in most for name in layout.namespaces]
    assert len(set(names)) == 3 * 64
    assert max(len(station.cable) for station in most[0].stations) <= 15, "the kernel's limit"


LIVING = ["sparsepipe-70-1000-0-0", "sparsepipe-70-1000-0-1", "sparsepipe-70-1000-0-switch"]
DEAD = ["sparsepipe-71-900-1-0", "sparsepipe-71-900-1-switch"]
REUSED = ["sparsepipe-70-400-2-0"]  # the number was a killed process's before
OTHERS = ["blue", "sparsepipe", "sparsepipe-x-1-0-0", "sparsepipe-70-1000-0-0-more", "cni-123"]
ALL = [*LIVING, *DEAD, *REUSED, *OTHERS]


def test_owners_are_read_from_names() -> None:
    assert owners(OTHERS) == {}
    assert set(owners(ALL).values()) == {
        Owner(pid=70, started=1000),
        Owner(pid=71, started=900),
        Owner(pid=70, started=400),
    }


def test_only_what_killed_processes_made_is_left_over() -> None:
    interfaces = ["lo", "eth0", "spe70c0", "spe70c1", "spe71c0", "spe9c12", "spec", "spe70c0.1"]
    found = leftovers(ALL, interfaces, living={Owner(pid=70, started=1000)})
    assert found == (sorted([*DEAD, *REUSED]), ["spe71c0", "spe9c12"])


def test_blocks_are_given_once() -> None:
    assert free_block([]) == 0
    assert free_block(ALL) == 3
    assert free_block([*DEAD, *OTHERS]) == 0
    with pytest.raises(HardwareError, match=f"{BLOCKS} emulated clusters"):
        free_block([f"sparsepipe-1-1-{block}-switch" for block in range(BLOCKS)])
