"""An inventory as the emulated cluster has it: the same hosts and devices, on processors."""

from __future__ import annotations

from dataclasses import replace

from sparsepipe.cluster import Inventory, Link


def on_processors(inventory: Inventory, *, link_bytes_per_s: float | None = None) -> Inventory:
    """The inventory with processors for devices, at their own speed.

    Names, memory and profiles stay: the profiles say how fast a device is, made slower or not.

    Args:
        inventory: the hardware.
        link_bytes_per_s: between hosts; None: the inventory's.
    """
    link = inventory.link
    if link_bytes_per_s is not None:
        link = replace(link or Link(bytes_per_s=0), bytes_per_s=link_bytes_per_s)
    return replace(
        inventory,
        link=link,
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
