"""An emulated cluster as namespaces of one machine: names, addresses, commands, leftovers.

Pure: an inventory in, commands of ``ip`` and ``tc`` (package iproute2) out.

Each host is a network namespace. Its interface ``data`` is joined by a veth pair to a bridge
that lies in a namespace of its own, so that the machine's own network stays as it is. A token
bucket (``tc-tbf``) limits what leaves an interface, so there is one at both ends of each pair:
in the host, which limits what it sends, and at the bridge, which limits what it receives. Ranks
of one host reach each other through its own address, which no bucket limits. Through its interface
``control`` a host reaches the launching process, without limit either: what ranks leave for
each other in its store is not traffic of the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
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
"""MTU of the emulated network: packets have 8,948 bytes of payload and 66 bytes of headers."""
_BURST_BYTES = 2**16
"""Size of the largest TCP segment that the kernel sends; a smaller bucket would split it."""
_BURST_S = 0.004
"""Delay of the kernel's timer: the bytes that fall due meanwhile must also fit the bucket."""
_LONGEST_BURST_S = 0.1
_QUEUE_BYTES = 2**22
"""Bytes that a switch keeps before it drops packets."""
_MOST_HOSTS = 63
BLOCKS = 512
"""Number of emulated clusters that one machine can have at a time."""
_CONTROL_NET = IPv4Address("198.18.0.0")
"""Reserved for benchmarks of networks (RFC 2544), so no real machine has its addresses."""
_DATA_NET = IPv4Address("10.77.0.0")  # seen by the hosts only
_NAMESPACE = re.compile(r"sparsepipe-(\d+)-(\d+)-(\d+)-(?:\d+|switch)")
_CABLE = re.compile(r"spe(\d+)c\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process: its id and, since ids are reused, its start time in clock ticks since boot."""

    pid: int
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A host of the cluster.

    Args:
        host: its name in the inventory.
        namespace: its network namespace on this machine.
        port: its interface at the bridge.
        cable: the interface of this machine that leads to it.
        address: its address in the cluster.
        control: its address for connections to the launching process.
        launcher: address of the launching process, the same for all hosts.
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
    """The hosts of an emulated cluster, its switch's namespace, and the limits of its links."""

    stations: tuple[Station, ...]
    switch: str
    rate_bytes_per_s: float
    burst_bytes: int

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (*(station.namespace for station in self.stations), self.switch)


def lay_out(inventory: Inventory, *, owner: Owner, block: int, time_scale: float) -> Layout:
    """Names and addresses of an inventory's hosts in the emulated cluster number ``block`` (from 0)
    of this machine, and limits of their links, which are ``time_scale`` times slower.
    """
    hosts = [host.name for host in inventory.hosts]
    if len(hosts) > _MOST_HOSTS:
        raise HardwareError(
            f"the inventory has {len(hosts)} hosts, but at most {_MOST_HOSTS} can be emulated",
            remedy=f"choose hardware with at most {_MOST_HOSTS} hosts",
        )
    if inventory.link is None or not inventory.link.bytes_per_s:
        raise HardwareError(
            "the inventory lacks the bandwidth between its hosts",
            remedy="give its 'link' the 'bytes_per_s' that two hosts have between them",
        )
    rate = inventory.link.bytes_per_s / time_scale
    burst_bytes = int(_BURST_BYTES + _BURST_S * rate)  # what passes at once after a pause
    if burst_bytes > _LONGEST_BURST_S * rate:
        least = _BURST_BYTES / (_LONGEST_BURST_S - _BURST_S)
        raise HardwareError(
            f"a link of {inventory.link.bytes_per_s:.4g} bytes/s at hardware.time_scale="
            f"{time_scale:g} is too slow to be emulated: {burst_bytes} bytes pass at once, which "
            f"it would send in more than {_LONGEST_BURST_S:g} s",
            remedy="reduce hardware.time_scale until bytes/s divided by it are at least "
            f"{least:.3g}, or set hardware.network=loopback, which limits no link",
        )
    base = _CONTROL_NET + 256 * block
    tag = f"sparsepipe-{owner.pid}-{owner.started}-{block}"
    stations = tuple(
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
    )
    switch = f"{tag}-{_BRIDGE}"
    return Layout(stations=stations, switch=switch, rate_bytes_per_s=rate, burst_bytes=burst_bytes)


def making(layout: Layout) -> list[Command]:
    """Commands that make the cluster, in order."""
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


def limiting(layout: Layout, *, lifted: bool = False) -> list[Command]:
    """Commands that limit the links as :func:`making` does, or lift any limits if ``lifted``."""
    commands = [command for station in layout.stations for command in _buckets(station, layout)]
    if lifted:  # as a new interface is
        return [(*each[: each.index("root")], "root", "noqueue") for each in commands]
    return commands


def _buckets(station: Station, layout: Layout) -> list[Command]:
    """Commands that set the token buckets at both ends of a host's link."""
    rate, burst = round(8 * layout.rate_bytes_per_s), layout.burst_bytes
    limit = str(burst + _QUEUE_BYTES)
    bucket = ("tbf", "rate", f"{rate}bit", "burst", str(burst), "limit", limit)
    ends = ((station.namespace, DATA), (layout.switch, station.port))
    return [
        ("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket)
        for namespace, interface in ends
    ]


def owners(namespaces: Iterable[str]) -> dict[str, Owner]:
    """The process that made each namespace, by namespace; without those of other programs."""
    found = {name: _NAMESPACE.fullmatch(name) for name in namespaces}
    return {n: Owner(pid=int(m[1]), started=int(m[2])) for n, m in found.items() if m is not None}


def leftovers(
    namespaces: Iterable[str], interfaces: Iterable[str], *, living: Collection[Owner]
) -> tuple[list[str], list[str]]:
    """Namespaces and cables of emulated clusters whose owners are not among the ``living``."""
    pids = {owner.pid for owner in living}
    dead = [name for name, owner in owners(namespaces).items() if owner not in living]
    cables = {name: _CABLE.fullmatch(name) for name in interfaces}
    loose = [name for name, found in cables.items() if found and int(found[1]) not in pids]
    return sorted(dead), sorted(loose)


def free_block(namespaces: Iterable[str]) -> int:
    """The lowest block number that no cluster uses; raises a HardwareError if all are taken."""
    found = (_NAMESPACE.fullmatch(name) for name in namespaces)
    taken = {int(match[3]) for match in found if match}
    if free := set(range(BLOCKS)) - taken:
        return min(free)
    raise HardwareError(
        f"{len(taken)} emulated clusters run on this machine, the most that it can have",
        remedy="wait until one of them has ended",
    )


def on_processors(inventory: Inventory, *, link_bytes_per_s: float | None = None) -> Inventory:
    """The inventory with CPU devices (profiles give speeds) and, if given, this link bandwidth."""
    joined = joined_by(inventory, link_bytes_per_s)
    hosts = []
    for host in joined.hosts:
        devices = (replace(each, accelerator="cpu", slowdown=1.0) for each in host.devices)
        hosts.append(replace(host, devices=tuple(devices)))
    return replace(joined, hosts=tuple(hosts))
