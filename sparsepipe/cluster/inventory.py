"""Inventories as values: hosts with devices, links between them, YAML in and out."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml

from sparsepipe.errors import HardwareError
from sparsepipe.utils import reading

Accelerator = Literal["cpu", "cuda"]
_MOST_DEVICES = 10_000
"""More than any cluster has that one network is trained on; searches of plans list them all."""
_NUMBERS = (
    "count",
    "memory_bytes",
    "tflops",
    "memory_bytes_per_s",
    "bytes_per_s",
    "latency_s",
    "slowdown",
)
_OPTIONAL = ("memory_bytes", "tflops", "memory_bytes_per_s")
_Value = TypeVar("_Value", bound="Device | Link | Host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A number of like devices in one host.

    Args:
        name: the model, as the vendor calls it.
        count: how many of them.
        accelerator: ``cpu`` (one device a core) or ``cuda``.
        memory_bytes: memory of one device; cores of a host share it evenly.
        tflops: peak in 1e12 floating-point operations a second, if known.
        memory_bytes_per_s: memory bandwidth, if known.
        profile: profile file of each model measured on this device, by model name.
        slowdown: how many times slower than this host's processor it is made, by pausing; for
            CPU devices.

    Raises:
        HardwareError: a slowdown below 1, or of a GPU.
    """

    name: str
    count: int
    accelerator: Accelerator = "cuda"
    memory_bytes: int | None = None
    tflops: float | None = None
    memory_bytes_per_s: float | None = None
    profile: Mapping[str, str] = field(default_factory=dict)
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        number = isinstance(self.slowdown, (int, float)) and not isinstance(self.slowdown, bool)
        if not (number and math.isfinite(self.slowdown) and self.slowdown >= 1):
            raise HardwareError(
                f"slowdown is {self.slowdown!r}",
                remedy="give slowdown a number from 1 on: 2 is half the speed",
            )
        if self.slowdown != 1 and self.accelerator != "cpu":
            raise HardwareError(
                f"{self.name} has slowdown {self.slowdown:g} and is no CPU",
                remedy="leave its slowdown out, or give it accelerator: cpu; only processors are "
                "made slower",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection, in bytes per second each way.

    Partitioning leaves ``latency_s`` out: the paper's cost models and PipeDream's have none.
    """

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: its devices and the link between them."""

    name: str
    devices: tuple[Device, ...]
    link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All hosts a run may use, and the link between any two of them.

    Raises:
        HardwareError: they have more than 10,000 devices.
    """

    hosts: tuple[Host, ...]
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.num_devices > _MOST_DEVICES:
            raise HardwareError(
                f"the inventory has {self.num_devices:,} devices, more than {_MOST_DEVICES:,}",
                remedy="lower 'count', the number of like devices in one host, or, of the machine "
                "at hand, hardware.cpu_devices",
            )

    @property
    def num_devices(self) -> int:
        """Devices over all hosts."""
        return sum(device.count for host in self.hosts for device in host.devices)

    @property
    def accelerator(self) -> Accelerator:
        """The kind of device; an inventory of several kinds is refused where it is run on.

        Raises:
            HardwareError: devices of both kinds.
        """
        kinds: set[Accelerator] = {d.accelerator for host in self.hosts for d in host.devices}
        if len(kinds) != 1:
            raise HardwareError(
                f"the inventory mixes {sorted(kinds) or 'no'} devices",
                remedy="list devices of one kind, 'cpu' or 'cuda'",
            )
        return kinds.pop()

    def devices_per_host(self, num_hosts: int) -> int:
        """Devices that each of the first ``num_hosts`` hosts has.

        A single host stands for any number of its kind.

        Raises:
            HardwareError: there are fewer hosts.
        """
        if num_hosts > len(self.hosts) > 1:
            raise HardwareError(
                f"{num_hosts} hosts are requested, the inventory has {len(self.hosts)}",
                remedy=f"set parallel.num_nodes={len(self.hosts)} or less, or choose another "
                "hardware",
            )
        return min(sum(d.count for d in host.devices) for host in self.hosts[:num_hosts])

    def require(self, count: int, *, num_hosts: int = 1) -> None:
        """Asserts that each of the first ``num_hosts`` hosts has ``count`` devices.

        Raises:
            HardwareError: one has fewer, or there are fewer hosts.
        """
        available = self.devices_per_host(num_hosts)
        if count > available:
            names = ", ".join(
                f"{device.count} x {device.name}"
                for host in self.hosts[:num_hosts]
                for device in host.devices
            )
            each = " on each host" if num_hosts > 1 else ""
            raise HardwareError(
                f"{count} devices are requested{each}, the inventory has {available} ({names})",
                remedy=f"set parallel.devices={available * num_hosts} or less, or choose "
                "another hardware",
            )

    def fingerprint(self) -> str:
        """A hash of what is computed on: equal for inventories that are interchangeable.

        Host names are left out, so that a run can go on on another machine of the same kind,
        and memory counts by the GiB, since what a kernel reports differs between boots.
        """
        value = asdict(self)
        for host in value["hosts"]:
            del host["name"]
            for device in host["devices"]:
                del device["profile"]  # where it lies; what it holds counts where it is used
                device["memory_bytes"] = round((device["memory_bytes"] or 0) / 2**30)
                if device["slowdown"] == 1:
                    del device["slowdown"]  # as of runs from before there was any
        text = json.dumps(value, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The inventory as YAML; :meth:`from_yaml` reads it back."""
        plain = json.loads(json.dumps(asdict(self)))  # lists, no tuples
        return yaml.safe_dump(plain, sort_keys=False)

    @classmethod
    def from_yaml(cls, source: str | os.PathLike[str]) -> Inventory:
        """Reads an inventory file.

        Raises:
            HardwareError: the file is missing, not YAML, or no inventory; see :meth:`from_dict`.
        """
        remedy = "check the path, and that the file is an inventory: docs/own_cluster.md"
        with reading.explained(Path(source), "inventory", error=HardwareError, remedy=remedy):
            return cls.from_dict(reading.parse_yaml(reading.read_text(source)))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Inventory:
        """Builds an inventory from plain mappings and lists, without devices of ``count: 0``.

        Raises:
            HardwareError: a key is missing or unknown, a value is not a number or a name, a name
                occurs twice, or the devices are none or more than 10,000.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("hosts"), list):
            raise HardwareError("the inventory lists no hosts", remedy="give it a list 'hosts'")
        hosts = [_host(host, f"hosts[{n}]") for n, host in enumerate(value["hosts"])]
        _check_distinct([host.name for host in hosts], "the inventory", "hosts")
        speeds: dict[str, float] = {}  # profiles and searches know devices by their names
        for device in (device for host in hosts for device in host.devices):
            if speeds.setdefault(device.name, device.slowdown) != device.slowdown:
                raise HardwareError(
                    f"{device.name} has slowdown {speeds[device.name]:g} on one host and "
                    f"{device.slowdown:g} on another",
                    remedy="call devices of different speeds by different names",
                )
        used = (replace(h, devices=tuple(d for d in h.devices if d.count)) for h in hosts)
        found = tuple(host for host in used if host.devices)
        if not found:
            raise HardwareError(
                "the inventory has no device: the count of each is 0",
                remedy="give a device of the hardware inventory a 'count' above 0",
            )
        return cls(hosts=found, link=_link(value.get("link"), "link"))


def _host(value: Any, place: str) -> Host:
    listed = value.get("devices") if isinstance(value, Mapping) else None
    if not isinstance(listed, list) or not listed:
        raise HardwareError(
            f"{place} is {reading.shown(value)}, and has no devices",
            remedy="give it a 'name' and a list of 'devices'",
        )
    devices = tuple(_build(Device, each, f"{place}.devices[{n}]") for n, each in enumerate(listed))
    link = _link(value.get("link"), f"{place}.link")
    host = _build(Host, {**value, "devices": devices, "link": link}, place)
    _check_distinct([device.name for device in devices], f"host {host.name!r}", "devices")
    return host


def _check_distinct(names: Sequence[str], where: str, what: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise HardwareError(
            f"{where} lists several {what} of one name: {', '.join(map(str, twice))}",
            remedy="give each a name of its own; like devices of a host are one entry, with their "
            "'count'",
        )


def _link(value: Any, place: str) -> Link | None:
    return None if value is None else _build(Link, value, place)


def _build(kind: type[_Value], value: Any, place: str) -> _Value:
    what, known = kind.__name__.lower(), [f.name for f in fields(kind)]
    if not isinstance(value, Mapping):
        raise HardwareError(
            f"{place} is {reading.shown(value)}, which is no {what}",
            remedy=f"give a mapping with {', '.join(known)}",
        )
    if unknown := sorted(str(key) for key in value if key not in known):
        raise HardwareError(
            f"{place}: a {what} has no {', '.join(unknown)}", remedy=f"use {', '.join(known)}"
        )
    try:
        return kind(**{key: _checked(key, item, place) for key, item in value.items()})
    except TypeError as error:
        raise HardwareError(
            f"{place}: a {what} is incomplete: {error}", remedy="add what is missing"
        ) from error


def _checked(key: str, value: Any, place: str) -> Any:
    """A number as such, also where YAML takes it for text, as it does with 12e9."""
    if key in _NUMBERS:
        return value if value is None and key in _OPTIONAL else _number(key, value, place)
    try:
        if key == "name":
            return reading.name(value, f"{place}.{key}")
        if key == "profile":
            files = reading.mapping(value, f"{place}.{key}")
            return {model: reading.name(file, f"{place}.{key}") for model, file in files.items()}
    except ValueError as error:
        raise HardwareError(str(error), remedy="give a text, in quotes") from error
    if key == "accelerator" and value not in get_args(Accelerator):
        raise HardwareError(
            f"{place}.{key} is {reading.shown(value)}",
            remedy=f"give one of {', '.join(get_args(Accelerator))}",
        )
    return value


def _number(key: str, value: Any, place: str) -> float:
    number = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
    if not reading.is_amount(number) or (key == "count" and not isinstance(number, int)):
        kind = "whole number" if key == "count" else "number"
        raise HardwareError(
            f"{place}.{key} is {reading.shown(value)}",
            remedy=f"give {key} a {kind} from 0 to {reading.LARGEST:g}",
        )
    return number  # type: ignore[no-any-return]


def joined_by(inventory: Inventory, bytes_per_s: float | None) -> Inventory:
    """The inventory with another bandwidth between its hosts; None: with its own."""
    if bytes_per_s is None:
        return inventory
    link = inventory.link or Link(bytes_per_s=0)
    return replace(inventory, link=replace(link, bytes_per_s=bytes_per_s))


def joined_where_missing(inventory: Inventory, bytes_per_s: float | None) -> Inventory:
    """The inventory with a bandwidth for all links that have none; None: with its own alone."""
    if bytes_per_s is None:
        return inventory
    link = Link(bytes_per_s=bytes_per_s)
    hosts = tuple(replace(host, link=host.link or link) for host in inventory.hosts)
    return replace(inventory, hosts=hosts, link=inventory.link or link)


def how_to_give_links(inventory: Inventory) -> str:
    """A remedy that names every link without a bandwidth, so that one refusal is enough; empty
    where all have one.
    """
    several = [host for host in inventory.hosts if sum(each.count for each in host.devices) > 1]
    places = [f"host {host.name}" for host in several if host.link is None]
    if inventory.link is None and len(inventory.hosts) > 1:
        places.append("the inventory, between its hosts")
    if not places:
        return ""
    listed = " and for ".join(places)
    return f"write link: {{bytes_per_s: ...}} for {listed}, as task=bandwidth measures it"
