"""Which device of an inventory a profile is of, made ready as it will be used."""

from __future__ import annotations

import os

import torch

from sparsepipe.cluster import Inventory, Place
from sparsepipe.cluster.places import places
from sparsepipe.errors import ConfigError, HardwareError
from sparsepipe.experiment.placing import cuda_devices
from sparsepipe.machine import usable_cores


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

    A CPU's device is its share of the cores, as ranks get it when all devices of the host are in
    use: this process computes with as many threads from now on, unless the environment says how
    many. A GPU becomes the current one.

    Raises:
        HardwareError: the GPU is not here.
    """
    if place.accelerator == "cuda":
        (index,) = cuda_devices((place,), inventory, rank=0, nodes=1)
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if "OMP_NUM_THREADS" not in os.environ:
        beside = sum(other.host == place.host for other in places(inventory))
        torch.set_num_threads(max(1, usable_cores() // beside))
    return torch.device("cpu")
