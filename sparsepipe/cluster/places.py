"""Single devices of an inventory: the device of each rank, and the GPU that a device is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.cluster.inventory import Accelerator, Host, Inventory
from sparsepipe.errors import HardwareError, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One device; ``number`` is its index, from 0, among its host's devices of model ``name``."""

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
    """Returns all devices of the inventory, in its order."""
    return tuple(place for host in inventory.hosts for place in _places_in(host))


def place_of(inventory: Inventory, text: str) -> Place:
    """Returns the device with this name in plan files, such as ``host/RTX 2080 Ti/2``."""
    there = {place.text: place for place in places(inventory)}
    if text not in there:
        raise HardwareError(
            f"the inventory has no device {text!r}",
            remedy=f"name one of its devices: {', '.join(there) or 'none'}",
        )
    return there[text]


def device_name(text: str) -> str:
    """Returns the model in a device's name from a plan file: ``RTX 2080 Ti`` of ``host/RTX 2080
    Ti/2``. A name without slashes, as in plans made by hand, is returned unchanged.
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
    """Returns the device of each rank.

    Ranks take the devices that a plan names, if the inventory has all of them. Otherwise (a plan
    made by hand, with devices ``rank 0`` and so on, or for another inventory) they take the devices
    in the inventory's order.

    Args:
        inventory: the hardware, with enough devices (:meth:`Inventory.require`). A single host
            stands for any number of such hosts.
        devices: names of a plan's devices, one for each rank; None: no plan.
        ranks: number of ranks on all nodes together.
        nodes: number of hosts that the run uses. Without a plan, each has the same number of
            ranks, unless all devices of these hosts are in use.
        searched: whether a search chose the plan's devices, so that no others may replace them.
    """
    chosen = named_places(inventory, devices or ())
    # A single host may stand for several nodes, whose devices have the same names.
    alike = nodes > len(inventory.hosts) and len(set(chosen or ())) < ranks
    if chosen is not None and not alike:
        if len(chosen) != ranks or len(set(chosen)) != ranks:
            raise PlanError(
                f"the plan names {', '.join(place.text for place in chosen)}, but needs a "
                f"different device for each rank, {ranks} in all",
                remedy="name one device for each rank, and none twice",
            )
        ranks_of_nodes(chosen, inventory, nodes=nodes)
        return chosen
    if searched and devices is not None:
        there = [place.text for place in places(inventory)]
        pairs = zip(devices, _as_called_now(inventory, devices), strict=True)
        if others := [name for name, now in pairs if "/" in name and now not in there]:
            raise PlanError(
                f"the plan is for {', '.join(others)}, but the inventory has {', '.join(there)}",
                remedy="choose the hardware that the plan was searched for, or search for a plan "
                "for this hardware; or give the plan's config and cuts as parallel.plan.config and "
                "parallel.plan.cuts, so that ranks take the devices in the inventory's order",
            )
    hosts = inventory.hosts if len(inventory.hosts) > 1 else inventory.hosts * nodes
    found = [_places_in(host) for host in hosts[:nodes]]
    each = None if sum(map(len, found)) == ranks else ranks // nodes
    return tuple(place for on_host in found for place in on_host[:each])


def named_places(inventory: Inventory, devices: Sequence[str]) -> tuple[Place, ...] | None:
    """Returns the devices with these names in a plan; None: no names, or one not in the inventory.

    If plan and inventory have a single host each, the hosts' names need not agree: machines are
    renamed, and a run may continue on another machine of the same kind.
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
    """Returns the ranks on each node, in the order of the node's processes.

    Ranks are numbered stage after stage, but launchers number processes node after node. Nodes are
    the hosts of the devices ``chosen`` for the ranks, in the inventory's order; an inventory with a
    single host stands for any number of such hosts.
    """
    if len(inventory.hosts) == 1:
        each = len(chosen) // nodes
        return tuple(tuple(range(node * each, (node + 1) * each)) for node in range(nodes))
    hosts = [host.name for host in inventory.hosts]
    used = sorted({place.host for place in chosen}, key=hosts.index)
    if len(used) != nodes:
        how = "with torchrun on each of these hosts" if len(used) > 1 else "there"
        raise PlanError(
            f"the plan's devices are on {', '.join(used)}, but parallel.num_nodes={nodes}",
            remedy=f"set parallel.num_nodes={len(used)} and start the command {how}, or make a "
            "plan for devices of as many hosts as num_nodes",
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
    """Returns CUDA's index of each of these devices: the device with ``number`` k of a model is the
    k-th GPU of that model, from 0.

    The model of a GPU is the longest model name in the inventory that the GPU's own name contains
    as whole words, as ``NVIDIA GeForce RTX 2080 Ti`` contains ``RTX 2080 Ti``.

    Args:
        places: devices of ``host``.
        gpus: names of this machine's GPUs, in CUDA's order.
        host: the inventory's entry for this machine.
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
                f"the inventory has {place.text}, but this machine has only {len(alike)} of these "
                f"GPUs; torch finds {listed or 'no GPU'}",
                remedy="choose the hardware of this machine (hardware=local), or give the devices "
                "of the inventory the names and counts that torch finds",
            )
        found.append(alike[place.number])
    return found


def any_alike_serve(places: Sequence[Place]) -> bool:
    """Whether, of each model, ``places`` are its first devices, so that any GPUs of it will do.

    :func:`gpu_indices` counts only the GPUs that the process sees. If it sees no more than it
    needs, these can only be the first devices of each model.
    """
    numbers: dict[str, set[int]] = {}
    for place in places:
        numbers.setdefault(place.name, set()).add(place.number)
    return all(found == set(range(len(found))) for found in numbers.values())
