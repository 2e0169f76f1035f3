"""The devices that a model is split over, by kind, and the bandwidths between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from sparsepipe.cluster import Inventory, Link
from sparsepipe.cluster.inventory import how_to_give_links
from sparsepipe.errors import HardwareError

Counts = tuple[int, ...]
"""Number of devices of each kind."""

SEVERAL = -1
"""Takes the place of a host's index if the devices of a stage are on several hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Interchangeable devices, of the same model and on the same host.

    Args:
        name: model of the devices.
        host: name of their host.
        count: number of devices.
        memory_bytes: memory of one device; None: unknown.
        tflops: peak speed of a device, in 1e12 floating-point operations per second; None: unknown.
    """

    name: str
    host: str
    count: int
    memory_bytes: float | None = None
    tflops: float | None = None


def kinds_of(inventory: Inventory) -> tuple[DeviceKind, ...]:
    """The kinds of devices with a count above 0, in the inventory's order."""
    return tuple(
        DeviceKind(
            name=device.name,
            host=host.name,
            count=device.count,
            memory_bytes=device.memory_bytes,
            tflops=device.tflops,
        )
        for host in inventory.hosts
        for device in host.devices
        if device.count
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """Kinds of devices in the inventory's order, and the bandwidth between any two devices.

    Args:
        kinds: the kinds, at least one.
        inside: bytes/s between the devices of a host, by host name; infinite for a single device.
        between: bytes/s between hosts; infinite for a single host.

    Attributes:
        counts: number of devices of each kind.
        num_devices: N, number of devices of all kinds.
        speeds: the bandwidths that occur between two devices, in bytes/s.
        is_uniform: whether the bandwidth is the same between any two devices.
    """

    kinds: tuple[DeviceKind, ...]
    inside: Mapping[str, float]
    between: float
    counts: Counts = field(init=False, compare=False, repr=False)
    num_devices: int = field(init=False, compare=False, repr=False)
    speeds: frozenset[float] = field(init=False, compare=False, repr=False)
    is_uniform: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        counts = tuple(kind.count for kind in self.kinds)
        on_host = dict.fromkeys(self.inside, 0)
        for kind in self.kinds:
            on_host[kind.host] += kind.count
        speeds = {self.inside[host] for host, count in on_host.items() if count > 1}
        if len(self.inside) > 1:
            speeds.add(self.between)
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "num_devices", sum(counts))
        object.__setattr__(self, "speeds", frozenset(speeds))
        object.__setattr__(self, "is_uniform", len(speeds) <= 1)

    @classmethod
    def of(cls, inventory: Inventory, *, bandwidth_bytes_per_s: float | None = None) -> DevicePool:
        """The pool of an inventory; ``bandwidth_bytes_per_s``, if given, holds for all links."""
        kinds = kinds_of(inventory)
        if bandwidth_bytes_per_s is not None:
            speed = _speed(Link(bytes_per_s=bandwidth_bytes_per_s), "between devices", inventory)
            return cls(kinds=kinds, inside={k.host: speed for k in kinds}, between=speed)
        inside = {}
        for host in inventory.hosts:
            if count := sum(device.count for device in host.devices):
                of_host = f"of host {host.name!r}"
                inside[host.name] = inf if count == 1 else _speed(host.link, of_host, inventory)
        between = _speed(inventory.link, "between the hosts", inventory) if len(inside) > 1 else inf
        return cls(kinds=kinds, inside=inside, between=between)

    def host_of(self, counts: Sequence[int]) -> int:
        """Index in ``inside`` of the host of the devices ``counts``, or :data:`SEVERAL`."""
        names = list(self.inside)
        hosts = {names.index(kind.host) for kind, n in zip(self.kinds, counts, strict=True) if n}
        return hosts.pop() if len(hosts) == 1 else SEVERAL

    def sync_bytes_per_s(self, counts: Sequence[int]) -> float:
        """Bandwidth in bytes/s of the slowest link between these devices; infinite for one."""
        on_host = dict.fromkeys(self.inside, 0)
        for kind, count in zip(self.kinds, counts, strict=True):
            on_host[kind.host] += count
        used = [self.inside[host] for host, count in on_host.items() if count > 1]
        if sum(map(bool, on_host.values())) > 1:
            used.append(self.between)
        return min(used, default=inf)

    def between_hosts(self, counts: Sequence[int], following: Sequence[int]) -> tuple[float, int]:
        """Bandwidth in bytes/s between two successive stages, and how many links share a transfer.

        Each receiving host has a link or, if both stages have the same hosts, each receiver.
        """
        hosts, receiving = (
            {kind.host for kind, n in zip(self.kinds, each, strict=True) if n}
            for each in (counts, following)
        )
        if hosts == receiving:
            return min(self.inside[host] for host in hosts), sum(following)
        return self.between, len(receiving)

    def cut_bytes_per_s(self, host: int, following: int) -> float:
        """Bandwidth in bytes/s between successive stages, given the :meth:`host_of` each."""
        if self.is_uniform:
            return next(iter(self.speeds), inf)
        if host == following != SEVERAL:
            return list(self.inside.values())[host]
        return self.between


def _speed(link: Link | None, of: str, inventory: Inventory) -> float:
    if link is None:
        raise HardwareError(
            f"no bandwidth is given for the link {of}",
            remedy=f"{how_to_give_links(inventory)}, or give one bandwidth for all links "
            "(task.bandwidth_bytes_per_s)",
        )
    if not 0 < link.bytes_per_s < inf:
        raise HardwareError(
            f"the bandwidth of the link {of} is {link.bytes_per_s} bytes/s",
            remedy="give a finite number above 0, for example as measured with task=bandwidth",
        )
    return float(link.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A stage that a search has chosen.

    Attributes:
        first: index of the first layer or, in a graph, of the state that the stage extends.
        end: index of the first layer of the next stage or, in a graph, of the state at its end.
        counts: number of devices of each kind.
    """

    first: int
    end: int
    counts: Counts

    def text(self, kinds: tuple[DeviceKind, ...]) -> str:
        """Layers and devices as text, such as ``0-23 on 4 x RTX 2080 Ti + 1 x TITAN V``."""
        return f"{self.first}-{self.end - 1} on {devices_text(self.counts, kinds)}"


def devices_text(counts: Counts, kinds: tuple[DeviceKind, ...]) -> str:
    """Devices as text, with the host if several hosts have the same model."""
    names = [kind.name for kind in kinds]
    return " + ".join(
        f"{count} x {kind.name}" + (f" of {kind.host}" if names.count(kind.name) > 1 else "")
        for kind, count in zip(kinds, counts, strict=True)
        if count
    )
