"""An inventory as the emulated cluster has it: the same hosts and devices, on processors."""

from __future__ import annotations

from dataclasses import replace

from sparsepipe.cluster import Inventory


def on_processors(inventory: Inventory) -> Inventory:
    """The inventory with processors for devices, at their own speed.

    Names, memory and profiles stay: the profiles say how fast a device is, made slower or not.
    """
    return replace(
        inventory,
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
