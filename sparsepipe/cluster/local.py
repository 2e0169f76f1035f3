"""Detection of the machine at hand."""

from __future__ import annotations

import socket
from typing import Literal

from sparsepipe.cluster.inventory import Device, Host, Inventory
from sparsepipe.errors import HardwareError
from sparsepipe.utils.host import cpu_name, memory_bytes, usable_cores


def local(
    *, accelerator: Literal["auto", "cpu", "cuda"] = "auto", cpu_devices: int | None = None
) -> Inventory:
    """The machine this runs on: its CUDA GPUs, or its CPU with one device a core.

    Only cores that this process may keep busy count (``taskset``, cpusets), and no more than a
    container's quota of processor time is worth (``docker --cpus``).

    Args:
        accelerator: ``auto`` takes the GPUs where there are any.
        cpu_devices: how many devices the CPU is to count as; by default one a core. With more,
            processes share cores, and the run's speed is not that of so many machines.

    Raises:
        HardwareError: ``cuda`` is given where torch sees no GPU, or an unknown kind, or no
            device at all.
    """
    if accelerator not in ("auto", "cpu", "cuda"):
        raise HardwareError(
            f"no accelerator is called {accelerator!r}", remedy="use 'auto', 'cpu' or 'cuda'"
        )
    if cpu_devices is not None and cpu_devices < 1:
        raise HardwareError(
            f"a CPU of {cpu_devices} devices", remedy="set hardware.cpu_devices to 1 or more"
        )
    devices = () if accelerator == "cpu" else _cuda_devices()
    if not devices and accelerator == "cuda":
        raise HardwareError(
            "torch sees no CUDA device here",
            remedy="install a CUDA build of torch and its driver, or set hardware.accelerator=cpu",
        )
    return Inventory(
        hosts=(Host(name=socket.gethostname(), devices=devices or (_cpu(cpu_devices),)),)
    )


def _cuda_devices() -> tuple[Device, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    memories: dict[str, list[int]] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memories.setdefault(properties.name, []).append(properties.total_memory)
    # What is in use by the driver may differ a little between like devices: the least counts.
    return tuple(
        Device(name=name, count=len(each), accelerator="cuda", memory_bytes=min(each))
        for name, each in memories.items()
    )


def _cpu(devices: int | None) -> Device:
    count = devices or usable_cores()
    total_bytes = memory_bytes()
    return Device(
        name=cpu_name(),
        count=count,
        accelerator="cpu",
        memory_bytes=None if total_bytes is None else total_bytes // count,
    )
