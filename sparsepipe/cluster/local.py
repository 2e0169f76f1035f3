"""Detects the devices of this machine."""

from __future__ import annotations

import socket
from typing import Literal

from sparsepipe.cluster.inventory import Device, Host, Inventory
from sparsepipe.errors import HardwareError
from sparsepipe.utils.arguments import Count, checked
from sparsepipe.utils.host import cpu_name, memory_bytes, usable_cores


@checked
def local(
    *, accelerator: Literal["auto", "cpu", "cuda"] = "auto", cpu_devices: Count | None = None
) -> Inventory:
    """Returns the inventory of this machine: its CUDA GPUs, or its CPU with one device per core.

    Counts only the cores that this process may use (``taskset``, cpusets), and no more than a
    container's CPU quota allows (``docker --cpus``).

    Args:
        accelerator: ``auto``: the GPUs if torch finds any, else the CPU.
        cpu_devices: number of devices that the CPU counts as; None: one per core. If it exceeds the
            number of cores, ranks share cores, and a run is slower than on as many real devices.
    """
    devices: list[Device] = []
    if accelerator != "cpu":
        import torch

        memories: dict[str, list[int]] = {}
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memories.setdefault(properties.name, []).append(properties.total_memory)
        # Equal devices may differ a little in memory, by the driver's share: the smallest counts.
        devices = [
            Device(name=name, count=len(each), accelerator="cuda", memory_bytes=min(each))
            for name, each in memories.items()
        ]
        if not devices and accelerator == "cuda":
            raise HardwareError(
                "torch finds no CUDA device on this machine",
                remedy="install a CUDA build of torch and its driver, or set "
                "hardware.accelerator=cpu",
            )
    if not devices:
        count, total_bytes = cpu_devices or usable_cores(), memory_bytes()
        cpu = Device(
            name=cpu_name(),
            count=count,
            accelerator="cpu",
            memory_bytes=None if total_bytes is None else total_bytes // count,
        )
        devices.append(cpu)
    return Inventory(hosts=(Host(name=socket.gethostname(), devices=tuple(devices)),))
