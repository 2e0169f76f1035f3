"""Which device of an inventory a profile is of, made ready as it will be used."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from sparsepipe import __version__
from sparsepipe.cluster import Inventory, Place
from sparsepipe.cluster.places import places
from sparsepipe.errors import ConfigError, HardwareError
from sparsepipe.planning.placing import cuda_devices
from sparsepipe.utils.host import cpu_name, usable_cores

_THREADS = "OMP_NUM_THREADS"


def find_device(inventory: Inventory, name: str | None) -> Place:
    """The first device of a kind.

    Args:
        inventory: the hardware.
        name: of the kind; None where there is one kind only.

    Raises:
        ConfigError: there is no such kind, or several and none is named.
        HardwareError: there is no device at all.
    """
    there = places(inventory)
    kinds = list(dict.fromkeys(place.name for place in there))
    if not kinds:
        raise HardwareError(
            "the inventory has no device", remedy="list devices in the hardware inventory"
        )
    if name is None and len(kinds) > 1:
        raise ConfigError(
            f"the inventory has several kinds of devices: {', '.join(kinds)}",
            remedy=f"say which is to be measured, as task.device='{kinds[0]}'",
        )
    if name is not None and name not in kinds:
        raise ConfigError(
            f"the inventory has no device that is called {name}",
            remedy=f"set task.device to one of {', '.join(kinds)}",
        )
    return next(place for place in there if name in (None, place.name))


def prepare_device(place: Place, inventory: Inventory) -> torch.device:
    """The device as torch calls it.

    This process computes with as many threads from now on as a rank does when all devices of the
    host are in use, unless the environment says how many: a CPU's device is its share of the
    cores. A GPU becomes the current one.

    Raises:
        HardwareError: the GPU is not here.
    """
    if _THREADS not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // devices_beside(place, inventory)))
    if place.accelerator == "cuda":
        (index,) = cuda_devices((place,), inventory, rank=0, nodes=1)
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def memory_of(place: Place, inventory: Inventory) -> int | None:
    """What a device has, as far as the inventory says."""
    devices = [device for host in inventory.hosts for device in host.devices]
    found = next(device.memory_bytes for device in devices if device.name == place.name)
    return None if found is None else int(found)


def devices_beside(place: Place, inventory: Inventory) -> int:
    """Devices of the same host, this one included."""
    return sum(other.host == place.host for other in places(inventory))


def words_of_device(place: Place, inventory: Inventory) -> list[str]:
    """What the time of a layer depends on and an inventory need not name."""
    share = max(1, usable_cores() // devices_beside(place, inventory))
    return [*words_of_machine(), f"{os.environ.get(_THREADS, share)} threads"]


def words_of_machine() -> list[str]:
    """What any measurement here depends on and an inventory need not name."""
    return [cpu_name(), f"torch {torch.__version__}", f"sparsepipe {__version__}"]


def without_links(inventory: Inventory) -> Inventory:
    """Its devices: what layers cost on them does not depend on how they are connected."""
    hosts = tuple(replace(host, link=None) for host in inventory.hosts)
    return replace(inventory, hosts=hosts, link=None)
