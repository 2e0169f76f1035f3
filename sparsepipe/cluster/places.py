"""The devices of an inventory one by one, and which of them each rank runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.cluster.inventory import Accelerator, Host, Inventory
from sparsepipe.errors import HardwareError, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One device.

    Args:
        host: name of its host.
        name: the model.
        number: which of its model in its host, from 0.
        slowdown: how many times slower it is made.
        accelerator: its kind.
    """

    host: str
    name: str
    number: int
    slowdown: float
    accelerator: Accelerator

    @property
    def text(self) -> str:
        """As plan files call it."""
        return f"{self.host}/{self.name}/{self.number}"


def places(inventory: Inventory) -> tuple[Place, ...]:
    """All devices, in the inventory's order."""
    return tuple(place for host in inventory.hosts for place in _places_in(host))


def place_of(inventory: Inventory, text: str) -> Place:
    """The device that a plan file calls so.

    Raises:
        HardwareError: the inventory does not have it.
    """
    there = {place.text: place for place in places(inventory)}
    if text not in there:
        raise HardwareError(
            f"the inventory has no device {text!r}",
            remedy=f"it has {', '.join(there) or 'none'}",
        )
    return there[text]


def places_for(
    inventory: Inventory, devices: Sequence[str] | None, *, ranks: int, nodes: int
) -> tuple[Place, ...]:
    """The device of each rank.

    A plan whose devices are all in the inventory says which; else ranks take the devices in the
    inventory's order, as those of a plan by hand, which calls its devices ``rank 0`` and so on,
    or of a plan made for another inventory.

    Args:
        inventory: the hardware, with enough devices (:meth:`Inventory.require`). A single host
            stands for any number of its kind.
        devices: that a plan names, one for each rank; None where there is no plan.
        ranks: over all nodes.
        nodes: hosts that run, each with the same number of ranks.

    Raises:
        PlanError: the plan's devices are not one for each rank, or lie on other hosts than ranks
            do, which are numbered node after node.
    """
    each = ranks // nodes
    there = {place.text: place for place in places(inventory)}
    if devices is not None and all(name in there for name in devices):
        chosen = tuple(there[name] for name in devices)
        _check(chosen, ranks=ranks)
        if len(inventory.hosts) > 1:
            _check_nodes(chosen, each)
        return chosen
    hosts = inventory.hosts if len(inventory.hosts) > 1 else inventory.hosts * nodes
    return tuple(place for host in hosts[:nodes] for place in _places_in(host)[:each])


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


def _check(chosen: Sequence[Place], *, ranks: int) -> None:
    if len(chosen) != ranks or len(set(chosen)) != ranks:
        raise PlanError(
            f"the plan names {', '.join(place.text for place in chosen)} for {ranks} ranks",
            remedy="name each device once, and one for each rank",
        )


def _check_nodes(chosen: Sequence[Place], each: int) -> None:
    """Refuses ranks of one node on several hosts, and two nodes on one."""
    taken: dict[str, int] = {}
    for rank, place in enumerate(chosen):
        node = rank // each
        if place.host != chosen[node * each].host or taken.setdefault(place.host, node) != node:
            raise PlanError(
                f"the plan has rank {rank} on {place.text}, where node {node} with its {each} "
                "ranks is not",
                remedy="ranks are numbered stage after stage and node after node: make a plan in "
                "which the devices of a host follow one another, and set parallel.num_nodes to "
                "the number of its hosts",
            )
