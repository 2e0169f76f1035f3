"""An inventory as the emulated cluster has it: the same hosts and devices, on processors."""

from __future__ import annotations

from dataclasses import replace

from sparsepipe.cluster import Inventory
from sparsepipe.cluster.between import joined_by


def on_processors(inventory: Inventory, *, link_bytes_per_s: float | None = None) -> Inventory:
    """The inventory with processors for devices, at their own speed.

    Names, memory and profiles stay: the profiles say how fast a device is, made slower or not.

    Args:
        inventory: the hardware.
        link_bytes_per_s: between hosts; None: the inventory's.
    """
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
