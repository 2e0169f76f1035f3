"""The link between hosts, where it is told apart from the inventory."""

from __future__ import annotations

from dataclasses import replace

from sparsepipe.cluster.inventory import Inventory, Link


def joined_by(inventory: Inventory, bytes_per_s: float | None) -> Inventory:
    """The inventory with a bandwidth between its hosts.

    Args:
        inventory: the hardware.
        bytes_per_s: whatever it says; None: as it says.
    """
    if bytes_per_s is None:
        return inventory
    link = inventory.link or Link(bytes_per_s=0)
    return replace(inventory, link=replace(link, bytes_per_s=bytes_per_s))
