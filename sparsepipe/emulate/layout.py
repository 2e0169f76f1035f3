"""An emulated cluster as namespaces of one machine: names, addresses, commands, leftovers.

Pure: an inventory in, commands of ``ip`` and ``tc`` (package iproute2) out.

Each host is a network namespace. Its interface ``data`` is joined by a veth pair to a bridge
that lies in a namespace of its own, so that the machine's own network stays as it is. A token
bucket (``tc-tbf``) limits what leaves an interface, so there is one at both ends of each pair:
in the host, which limits what it sends, and at the bridge, which limits what it gets. Ranks of
one host reach each other by its own address, which no bucket limits. By its interface
``control`` a host reaches the launching process, without limit either: what ranks leave for
each other in its store is no traffic of the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.inventory import joined_by
from sparsepipe.errors import HardwareError

Command = tuple[str, ...]

DATA, CONTROL = "data", "control"
"""Interfaces of a host."""
_BRIDGE = "switch"
_MTU_BYTES = 9000
"""MTU of the emulated network. Of each packet 8,948 bytes are payload and 66 headers: 0.7 %."""
_BURST_BYTES = 2**16
"""The kernel hands on TCP segments of up to 64 KiB as one; a smaller bucket would split them."""
_BURST_S = 0.004
"""What is due when the kernel's timer is late must fit the bucket too."""
_LONGEST_BURST_S = 0.1
_QUEUE_BYTES = 2**22
"""What a switch keeps before it drops packets."""
_MOST_BYTES = 2**32 - 1
"""Most bytes of a bucket with its queue: the kernel's ``tc_tbf_qopt.limit`` has 32 bits."""
_MOST_HOSTS = 63
BLOCKS = 512
"""Emulated clusters that one machine can have at a time."""
_CONTROL_NET = IPv4Address("198.18.0.0")
"""Set aside for measuring networks (RFC 2544), so that no machine is there."""
_DATA_NET = IPv4Address("10.77.0.0")  # seen by the hosts only
_NAMESPACE = re.compile(r"sparsepipe-(\d+)-(\d+)-(\d+)-(?:\d+|switch)")
_CABLE = re.compile(r"spe(\d+)c\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, also when its number is given to another one later."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A host of the cluster.

    Args:
        host: its name in the inventory.
        namespace: its name on this machine.
        port: its interface at the bridge.
        cable: the interface of this machine that leads to it.
        address: its address in the cluster.
        control: address by which it reaches ``launcher``.
        launcher: the launching process's address, the same for all stations: it listens on no
            other.
    """

    host: str
    namespace: str
    port: str
    cable: str
    address: str
    control: str
    launcher: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All of an emulated cluster."""

    stations: tuple[Station, ...]
    switch: str
    rate_bytes_per_s: float
    burst_bytes: int

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (*(station.namespace for station in self.stations), self.switch)

    @property
    def cables(self) -> tuple[str, ...]:
        return tuple(station.cable for station in self.stations)


def lay_out(inventory: Inventory, *, owner: Owner, block: int, time_scale: float) -> Layout:
    """The cluster of an inventory.

    Raises:
        HardwareError: the link is unknown, too slow or too fast to be emulated, or the hosts are
            too many.
    """
    hosts = [host.name for host in inventory.hosts]
    if len(hosts) > _MOST_HOSTS:
        raise HardwareError(
            f"the inventory has {len(hosts)} hosts, and a cluster of more than {_MOST_HOSTS} is "
            "not emulated",
            remedy=f"choose a hardware of at most {_MOST_HOSTS} hosts",
        )
    if inventory.link is None or not inventory.link.bytes_per_s:
        raise HardwareError(
            "the inventory has no bandwidth between its hosts",
            remedy="give its 'link' the 'bytes_per_s' that two hosts have between them",
        )
    rate = inventory.link.bytes_per_s / time_scale
    base = _CONTROL_NET + 256 * block
    tag = f"sparsepipe-{owner.pid}-{owner.started}-{block}"
    return Layout(
        stations=tuple(
            Station(
                host=host,
                namespace=f"{tag}-{number}",
                port=f"port{number}",
                cable=f"spe{owner.pid}c{number}",  # at most 15 letters
                address=str(_DATA_NET + 1 + number),
                control=str(base + 4 * number + 2),
                launcher=str(base + 1),
            )
            for number, host in enumerate(hosts)
        ),
        switch=f"{tag}-{_BRIDGE}",
        rate_bytes_per_s=rate,
        burst_bytes=burst_bytes(rate, unscaled=inventory.link.bytes_per_s),
    )


def burst_bytes(rate_bytes_per_s: float, *, unscaled: float | None = None) -> int:
    """The size of a bucket: what passes at once after a pause.

    Raises:
        HardwareError: a bucket holds so much of the link's time that the rate means nothing, or
            more than the kernel can count.
    """
    found = _BURST_BYTES + _BURST_S * rate_bytes_per_s
    link = rate_bytes_per_s if unscaled is None else unscaled
    text = f"a link of {link:.4g} bytes/s, at {rate_bytes_per_s:.4g} by hardware.time_scale, is"
    if found > _LONGEST_BURST_S * rate_bytes_per_s:
        least = _BURST_BYTES / (_LONGEST_BURST_S - _BURST_S)
        raise HardwareError(
            f"{text} slower than can be emulated: the {int(found)} bytes that pass at once are "
            f"more than {_LONGEST_BURST_S:g} s of it",
            remedy=f"set a smaller hardware.time_scale, so that {least:.3g} bytes/s or more are "
            "left, or hardware.network=loopback, which limits no link",
        )
    if found + _QUEUE_BYTES > _MOST_BYTES:
        most = (_MOST_BYTES - _QUEUE_BYTES - _BURST_BYTES) / _BURST_S
        raise HardwareError(
            f"{text} faster than can be emulated: the {found:.4g} bytes that pass at once are "
            "more than 32 bits can count, as the kernel does",
            remedy=f"set a larger hardware.time_scale, so that {most:.4g} bytes/s or less are "
            "left, a smaller hardware.link_bytes_per_s, or hardware.network=loopback, which limits "
            "no link",
        )
    return int(found)


def making(layout: Layout) -> list[Command]:
    """Commands that make the cluster, in order; each may be undone by :func:`unmaking`."""
    found: list[Command] = [
        ("ip", "netns", "add", layout.switch),
        ("ip", "-n", layout.switch, "link", "add", "name", _BRIDGE, "type", "bridge"),
        ("ip", "-n", layout.switch, "link", "set", _BRIDGE, "up"),
    ]
    switch, mtu = ("ip", "-n", layout.switch), ("mtu", str(_MTU_BYTES))
    peer = ("type", "veth", "peer", "name")
    for station in layout.stations:
        host, cable = ("ip", "-n", station.namespace), station.cable
        found += [
            ("ip", "netns", "add", station.namespace),
            (*host, "link", "set", "lo", "up"),
            (*switch, "link", "add", "name", station.port, *mtu, *peer, DATA, *mtu,
             "netns", station.namespace),
            (*switch, "link", "set", station.port, "master", _BRIDGE),
            *_buckets(station, layout),
            (*host, "addr", "add", f"{station.address}/24", "dev", DATA),
            (*switch, "link", "set", station.port, "up"),
            (*host, "link", "set", DATA, "up"),
            ("ip", "link", "add", "name", cable, *peer, CONTROL, "netns", station.namespace),
            ("ip", "addr", "add", station.launcher, "peer", f"{station.control}/32", "dev", cable),
            (*host, "addr", "add", station.control, "peer", f"{station.launcher}/32",
             "dev", CONTROL),
            ("ip", "link", "set", cable, "up"),
            (*host, "link", "set", CONTROL, "up"),
        ]  # fmt: skip
    return found


def limiting(layout: Layout) -> list[Command]:
    """Commands that limit the links as :func:`making` does, also where they are limited already."""
    return [command for station in layout.stations for command in _buckets(station, layout)]


def lifting(layout: Layout) -> list[Command]:
    """Commands that undo :func:`limiting`, and change nothing where that has been undone."""
    return [
        (*command[: command.index("root")], "root", "noqueue")  # as an interface begins
        for command in limiting(layout)
    ]


def _buckets(station: Station, layout: Layout) -> list[Command]:
    """Commands for the two token buckets of a host."""
    bucket = (
        "tbf",
        "rate", f"{round(8 * layout.rate_bytes_per_s)}bit",
        "burst", str(layout.burst_bytes),
        "limit", str(layout.burst_bytes + _QUEUE_BYTES),
    )  # fmt: skip
    ends = ((station.namespace, DATA), (layout.switch, station.port))
    return [
        ("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket)
        for namespace, interface in ends
    ]


def unmaking(namespaces: Sequence[str], cables: Sequence[str]) -> list[Command]:
    """Commands that remove interfaces and namespaces of a cluster."""
    return [
        *(("ip", "link", "del", cable) for cable in cables),
        *(("ip", "netns", "del", namespace) for namespace in namespaces),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Namespaces and cables of killed processes; :func:`unmaking` removes them."""

    namespaces: tuple[str, ...]
    cables: tuple[str, ...]


def owner_of(namespace: str) -> Owner | None:
    """The process that made a namespace; None: it is not of an emulated cluster."""
    found = _NAMESPACE.fullmatch(namespace)
    return None if found is None else Owner(pid=int(found[1]), started=int(found[2]))


def owners(namespaces: Iterable[str]) -> set[Owner]:
    """The processes that made namespaces."""
    return {owner for name in namespaces if (owner := owner_of(name)) is not None}


def leftovers(
    namespaces: Iterable[str], interfaces: Iterable[str], *, living: Collection[Owner]
) -> Leftovers:
    """Namespaces and cables of processes that have ended."""
    pids = {owner.pid for owner in living}
    dead = [name for name in namespaces if (owner := owner_of(name)) and owner not in living]
    loose = [
        name
        for name in interfaces
        if (found := _CABLE.fullmatch(name)) and int(found[1]) not in pids
    ]
    return Leftovers(namespaces=tuple(sorted(dead)), cables=tuple(sorted(loose)))


def free_block(namespaces: Iterable[str]) -> int:
    """The least number that no cluster uses. Raises a HardwareError where all are taken."""
    found = (_NAMESPACE.fullmatch(name) for name in namespaces)
    taken = {int(match[3]) for match in found if match}
    for block in range(BLOCKS):
        if block not in taken:
            return block
    raise HardwareError(
        f"{len(taken)} emulated clusters run on this machine",
        remedy="wait until one of them has ended",
    )


def on_processors(inventory: Inventory, *, link_bytes_per_s: float | None = None) -> Inventory:
    """The inventory with processors for devices; speeds come from profiles, without slowdowns."""
    return replace(
        joined_by(inventory, link_bytes_per_s),
        hosts=tuple(
            replace(
                host,
                devices=tuple(
                    replace(device, accelerator="cpu", slowdown=1.0) for device in host.devices
                ),
            )
            for host in inventory.hosts
        ),
    )
