"""The devices of an inventory one by one: which rank runs on which, and which GPUs they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.cluster.inventory import Accelerator, Host, Inventory
from sparsepipe.errors import HardwareError, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One device: ``number`` counts those of a model (``name``) in their host, from 0."""

    host: str
    name: str
    number: int
    slowdown: float
    accelerator: Accelerator

    @property
    def text(self) -> str:
        """Name of the device in plan files."""
        return f"{self.host}/{self.name}/{self.number}"


def places(inventory: Inventory) -> tuple[Place, ...]:
    """All devices, in the inventory's order."""
    return tuple(place for host in inventory.hosts for place in _places_in(host))


def place_of(inventory: Inventory, text: str) -> Place:
    """The device with this name in a plan file, such as ``host/RTX 2080 Ti/2``."""
    there = {place.text: place for place in places(inventory)}
    if text not in there:
        raise HardwareError(
            f"the inventory has no device {text!r}",
            remedy=f"it has {', '.join(there) or 'none'}",
        )
    return there[text]


def device_name(text: str) -> str:
    """The model of a device by its name in a plan file; profiles are found by it.

    Devices of a plan by hand, which are not those of an inventory, have names of one part.
    """
    return text.partition("/")[2].rpartition("/")[0] or text


def places_for(
    inventory: Inventory,
    devices: Sequence[str] | None,
    *,
    ranks: int,
    nodes: int,
    searched: bool = False,
) -> tuple[Place, ...]:
    """The device of each rank.

    A plan whose devices are all in the inventory chooses them; else ranks take the devices in the
    inventory's order, as those of a plan by hand (``rank 0`` and so on) or for another inventory.

    Args:
        inventory: the hardware, with enough devices (:meth:`Inventory.require`). A single host
            stands for any number of its kind.
        devices: devices of a plan, one for each rank; None: without a plan.
        ranks: number of ranks over all nodes.
        nodes: hosts that run; without a plan each has the same number of ranks, unless all
            devices of these hosts are in use.
        searched: the plan was made for certain devices; in an order by chance it is another.
    """
    chosen = named_places(inventory, devices or ())
    # A single host may stand for several nodes, whose devices are called alike.
    alike = nodes > len(inventory.hosts) and len(set(chosen or ())) < ranks
    if chosen is not None and not alike:
        if len(chosen) != ranks or len(set(chosen)) != ranks:
            raise PlanError(
                f"the plan names {', '.join(place.text for place in chosen)} for {ranks} ranks",
                remedy="name each device once, and one for each rank",
            )
        ranks_of_nodes(chosen, inventory, nodes=nodes)
        return chosen
    if searched and devices is not None:
        there = [place.text for place in places(inventory)]
        pairs = zip(devices, _as_called_now(inventory, devices), strict=True)
        if others := [name for name, now in pairs if "/" in name and now not in there]:
            raise PlanError(
                f"the plan is for {', '.join(others)}, and the inventory has {', '.join(there)}",
                remedy="choose the hardware that it was searched for, or search for a plan for "
                "this one; with its config and cuts as parallel.plan.config and "
                "parallel.plan.cuts, ranks take the devices in the inventory's order",
            )
    hosts = inventory.hosts if len(inventory.hosts) > 1 else inventory.hosts * nodes
    found = [_places_in(host) for host in hosts[:nodes]]
    each = None if sum(map(len, found)) == ranks else ranks // nodes
    return tuple(place for on_host in found for place in on_host[:each])


def named_places(inventory: Inventory, devices: Sequence[str]) -> tuple[Place, ...] | None:
    """The devices that a plan names; None where the inventory lacks one.

    A single host is the one that the plan is for, whatever it was called then: machines are
    renamed, and a run goes on on another one of the same kind.
    """
    named = _as_called_now(inventory, devices)
    there = {place.text: place for place in places(inventory)}
    if not named or not all(name in there for name in named):
        return None
    return tuple(there[name] for name in named)


def _as_called_now(inventory: Inventory, devices: Sequence[str]) -> list[str]:
    hosts = {name.partition("/")[0] for name in devices}
    if len(inventory.hosts) != 1 or len(hosts) != 1:
        return list(devices)
    return [f"{inventory.hosts[0].name}/{name.partition('/')[2]}" for name in devices]


def ranks_of_nodes(
    chosen: Sequence[Place], inventory: Inventory, *, nodes: int
) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, in the order of its processes.

    Ranks are numbered stage after stage, and launchers number processes node after node. Nodes
    are the hosts that have ranks, in the inventory's order; a single host stands for any number
    of its kind.
    """
    if len(inventory.hosts) == 1:
        each = len(chosen) // nodes
        return tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes))
    hosts = [host.name for host in inventory.hosts]
    used = sorted({place.host for place in chosen}, key=hosts.index)
    if len(used) != nodes:
        raise PlanError(
            f"the plan's devices lie on {len(used)} hosts ({', '.join(used)}), and "
            f"parallel.num_nodes={nodes}",
            remedy=f"start the command by torchrun on each of them, with parallel.num_nodes="
            f"{len(used)}, or make a plan for the devices of {nodes}",
        )
    return tuple(
        tuple(rank for rank, place in enumerate(chosen) if place.host == host) for host in used
    )


def _places_in(host: Host) -> list[Place]:
    return [
        Place(
            host=host.name,
            name=device.name,
            number=number,
            slowdown=device.slowdown,
            accelerator=device.accelerator,
        )
        for device in host.devices
        for number in range(device.count)
    ]


def gpu_indices(places: Sequence[Place], gpus: Sequence[str], *, host: Host) -> list[int]:
    """CUDA's number of each device; the k-th of a kind is the k-th GPU of that name.

    A GPU is of the kind whose name is its own, else of the longest name that it contains as whole
    words, as ``NVIDIA GeForce RTX 2080 Ti`` does ``RTX 2080 Ti``.

    Args:
        places: devices of ``host``.
        gpus: names of this machine's GPUs, in CUDA's order.
        host: the host, whose kinds of devices have different names.
    """
    kind_of = list[str | None]()
    for gpu in gpus:
        names = [device.name for device in host.devices]
        within = [name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", gpu)]
        kind_of.append(max(within, key=len, default=None))
    found = []
    for place in places:
        alike = [index for index in range(len(gpus)) if kind_of[index] == place.name]
        if place.number >= len(alike):
            listed = ", ".join(f"{index}: {gpu}" for index, gpu in enumerate(gpus))
            raise HardwareError(
                f"the inventory has {place.text}, and this machine has {len(alike)} GPUs of that "
                f"name; its GPUs are {listed or 'none that torch finds'}",
                remedy="choose the hardware at hand (hardware=local), or call the devices of the "
                "inventory as these are called",
            )
        found.append(alike[place.number])
    return found


def any_alike_serve(places: Sequence[Place]) -> bool:
    """Whether other GPUs of their kinds would serve these devices as well, as many of each.

    Of those that a process sees, :func:`gpu_indices` takes the k-th of a kind: one that sees no
    more than it needs has the first ones only.
    """
    numbers: dict[str, set[int]] = {}
    for place in places:
        numbers.setdefault(place.name, set()).add(place.number)
    return all(found == set(range(len(found))) for found in numbers.values())
