"""Hardware inventories, which list hosts with devices and links, and their YAML files."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError

from sparsepipe.errors import HardwareError
from sparsepipe.utils import reading

Accelerator = Literal["cpu", "cuda"]
_MOST_DEVICES = 10_000
"""Largest number of devices in an inventory: a search for a plan lists them all."""


def _amount(value: Any) -> Any:
    """Returns a YAML value as a number, even 12e9, which YAML reads as text; None stays None."""
    number = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)
    if number is not None and not reading.is_amount(number):
        shown = reading.shown(value)
        raise ValueError(f"{shown} should be a number from 0 to {reading.LARGEST:g}")
    return number


def _needed(value: Any) -> Any:
    if value is None:
        raise ValueError("null should be a number")
    return _amount(value)


def _above_0(value: Any) -> Any:
    if (number := _amount(value)) == 0:
        raise ValueError("0 should be above 0; leave it, or the whole link, out if it is unknown")
    return number


def _whole(value: Any) -> int:
    number = _amount(value)
    if not isinstance(number, int):
        raise ValueError(f"{reading.shown(value)} should be a whole number")
    return number


_Amount = Annotated[float, PlainValidator(_needed)]
_Known = Annotated[float | None, PlainValidator(_above_0)]
_NO_OTHERS = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Devices of one host that are all of the same model.

    Args:
        name: the device's model, as the vendor calls it.
        count: number of these devices in the host.
        accelerator: ``cpu`` (one device per core) or ``cuda``.
        memory_bytes: memory of one device, for a core its share of the host's; None: unknown.
        tflops: peak in 1e12 floating-point operations per second; None: unknown.
        memory_bytes_per_s: memory bandwidth of one device; None: unknown.
        profile: profile file of each model measured on this device, by model name.
        slowdown: factor, at least 1, by which pauses slow down a CPU device.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    name: str
    count: Annotated[int, PlainValidator(_whole)]
    accelerator: Accelerator = "cuda"
    memory_bytes: Annotated[int | None, PlainValidator(_above_0)] = None
    tflops: _Known = None
    memory_bytes_per_s: _Known = None
    profile: Mapping[str, str] = field(default_factory=dict)
    slowdown: _Amount = 1.0

    def __post_init__(self) -> None:
        slower = self.slowdown != 1
        if not 1 <= self.slowdown < math.inf or (slower and self.accelerator != "cpu"):
            raise HardwareError(
                f"{self.name}: slowdown {self.slowdown:g} is not possible with accelerator "
                f"{self.accelerator}",
                remedy="set slowdown to a finite number of at least 1 (2 means half the speed) for "
                "devices with accelerator: cpu, and leave it out for others",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection: its bandwidth in each direction, and the latency of a message.

    The partitioner ignores the latency, as the cost models of the paper and of PipeDream do.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    bytes_per_s: Annotated[float, PlainValidator(lambda value: _above_0(_needed(value)))]
    latency_s: _Amount = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: its devices, and the link between any two of them (None: unknown)."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    name: str
    devices: tuple[Device, ...]
    link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All hosts that a run may use, and the link between any two of them (None: unknown)."""

    __pydantic_config__: ClassVar[ConfigDict] = _NO_OTHERS
    hosts: tuple[Host, ...]
    link: Link | None = None

    def __post_init__(self) -> None:
        if self.num_devices > _MOST_DEVICES:
            raise HardwareError(
                f"the inventory has {self.num_devices:,} devices; the limit is {_MOST_DEVICES:,}",
                remedy="lower 'count', the number of equal devices in one host, or, with "
                "hardware=local, hardware.cpu_devices",
            )

    @property
    def num_devices(self) -> int:
        """Number of devices of all hosts together."""
        return sum(device.count for host in self.hosts for device in host.devices)

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The kinds of its devices: ``cpu``, ``cuda`` or both."""
        return tuple(sorted({d.accelerator for host in self.hosts for d in host.devices}))

    @property
    def accelerator(self) -> Accelerator:
        """``cpu`` or ``cuda``, that of all devices; raises a HardwareError unless all have one."""
        kinds = self.accelerators
        if len(kinds) != 1:
            raise HardwareError(
                f"the inventory mixes several kinds of devices: {', '.join(kinds) or '-'}",
                remedy="list devices of one kind, 'cpu' or 'cuda'; only task=partition, "
                "task=simulate and emulated hardware take both",
            )
        return kinds[0]

    def devices_per_host(self, num_hosts: int) -> int:
        """Smallest number of devices that one of the first ``num_hosts`` hosts has.

        An inventory with a single host stands for any number of such hosts.
        """
        if num_hosts > len(self.hosts) > 1:
            raise HardwareError(
                f"{num_hosts} hosts are requested, but the inventory has {len(self.hosts)}",
                remedy=f"set parallel.num_nodes={len(self.hosts)} or less, or choose hardware "
                "with more hosts",
            )
        return min(sum(d.count for d in host.devices) for host in self.hosts[:num_hosts])

    def require(self, count: int, *, num_hosts: int = 1) -> None:
        """Raises a HardwareError unless each of the first ``num_hosts`` hosts has at least
        ``count`` devices; an inventory with a single host stands for any number of such hosts.
        """
        available = self.devices_per_host(num_hosts)
        if count > available:
            names = ", ".join(
                f"{device.count} x {device.name}"
                for host in self.hosts[:num_hosts]
                for device in host.devices
            )
            each, has = (" on each host", "one host") if num_hosts > 1 else ("", "the inventory")
            raise HardwareError(
                f"{count} devices are requested{each}, but {has} has {available} ({names})",
                remedy=f"set parallel.devices={available * num_hosts} or less (on all hosts "
                "together), or choose hardware with more devices",
            )

    def fingerprint(self) -> str:
        """Returns a hash of the hardware, equal for inventories that are interchangeable.

        Host names are left out, so that a run can continue on another machine of the same kind.
        Memory is rounded to GiB, since what a kernel reports differs from boot to boot.
        """
        value = asdict(self)
        for host in value["hosts"]:
            del host["name"]
            for device in host["devices"]:
                del device["profile"]  # a path; the content counts where it is used
                device["memory_bytes"] = round((device["memory_bytes"] or 0) / 2**30)
                if device["slowdown"] == 1:
                    del device["slowdown"]  # which older runs do not have
        text = json.dumps(value, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The inventory as YAML; :meth:`from_yaml` reads it back."""
        plain = json.loads(json.dumps(asdict(self)))  # lists instead of tuples
        return yaml.safe_dump(plain, sort_keys=False)

    @classmethod
    def from_yaml(cls, source: str | os.PathLike[str]) -> Inventory:
        """Reads an inventory from a YAML file."""
        remedy = "check the path, and that the file is an inventory (docs/own_cluster.md)"
        with reading.explained(Path(source), "inventory", error=HardwareError, remedy=remedy):
            return cls.from_dict(reading.parse_yaml(reading.read_text(source)))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Inventory:
        """Builds an inventory from plain mappings and lists; drops devices with ``count: 0``."""
        try:
            given: Inventory = _adapter().validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the inventory"
            raise HardwareError(
                f"{place}: {first['msg']}", remedy="correct it as docs/own_cluster.md describes"
            ) from error
        speeds: dict[str, float] = {}  # profiles and searches identify devices by name
        for where, names in (
            ("the inventory", [host.name for host in given.hosts]),
            *((host.name, [device.name for device in host.devices]) for host in given.hosts),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                raise HardwareError(
                    f"{where} has several entries with the same name: {', '.join(sorted(twice))}",
                    remedy="give each entry a different name; list equal devices of a host as one "
                    "entry with a 'count'",
                )
        for device in (device for host in given.hosts for device in host.devices):
            if speeds.setdefault(device.name, device.slowdown) != device.slowdown:
                raise HardwareError(
                    f"{device.name} has slowdown {speeds[device.name]:g} on one host and "
                    f"{device.slowdown:g} on another",
                    remedy="give devices of different speeds different names",
                )
        used = (replace(h, devices=tuple(d for d in h.devices if d.count)) for h in given.hosts)
        found = tuple(host for host in used if host.devices)
        if not found:
            raise HardwareError(
                "the inventory has no devices",
                remedy="list hosts with devices, at least one of them with a 'count' above 0",
            )
        return replace(given, hosts=found)


@cache
def _adapter() -> TypeAdapter[Inventory]:
    return TypeAdapter(Inventory)


def joined_by(inventory: Inventory, bytes_per_s: float | None) -> Inventory:
    """Returns the inventory with this bandwidth between its hosts; None: unchanged."""
    if bytes_per_s is None:
        return inventory
    latency_s = inventory.link.latency_s if inventory.link else 0.0
    return replace(inventory, link=Link(bytes_per_s=bytes_per_s, latency_s=latency_s))


def joined_where_missing(inventory: Inventory, bytes_per_s: float | None) -> Inventory:
    """Returns the inventory with links of this bandwidth where it has none; None: unchanged."""
    if bytes_per_s is None:
        return inventory
    link = Link(bytes_per_s=bytes_per_s)
    hosts = tuple(replace(host, link=host.link or link) for host in inventory.hosts)
    return replace(inventory, hosts=hosts, link=inventory.link or link)


def how_to_give_links(inventory: Inventory) -> str:
    """Returns a remedy that names every missing link of the inventory; empty if it has all."""
    several = [host for host in inventory.hosts if sum(each.count for each in host.devices) > 1]
    places = [f"host {host.name}" for host in several if host.link is None]
    if inventory.link is None and len(inventory.hosts) > 1:
        places.append("the inventory, between its hosts")
    if not places:
        return ""
    listed = " and for ".join(places)
    return f"write link: {{bytes_per_s: ...}} for {listed}, as task=bandwidth measures it"
