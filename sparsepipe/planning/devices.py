"""Which devices of the inventory ranks compute on, and which one is measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sparsepipe import __version__
from sparsepipe.cluster import Inventory, Place, places_for
from sparsepipe.cluster.places import gpu_indices, named_places, places, ranks_of_nodes
from sparsepipe.config.division import Division, division_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError, HardwareError
from sparsepipe.utils.host import cpu_name, usable_cores


def places_of_ranks(
    spec: RunSpec, inventory: Inventory, *, ranks: int, kept: Path | None = None
) -> tuple[Place, ...]:
    """The device of each rank: that of the plan, else in the inventory's order.

    Raises:
        ConfigError: one is made slower, and the strategy cannot do that, or the strategy has a
            slowdown of its own.
        PlanError: the plan's devices lie on other hosts than the ranks, or a plan that was
            searched for is for others.
    """
    division = division_of(spec, kept=kept)
    devices = None if division is None else division.devices
    nodes = spec.parallel.num_nodes
    searched = division is not None and division.searched
    found = places_for(inventory, devices, ranks=ranks, nodes=nodes, searched=searched)
    _check_strategy(spec.parallel.strategy, found)
    return found


def are_there(division: Division | None, inventory: Inventory) -> bool:
    """Whether a plan names devices and the inventory has all of them."""
    if division is None or division.devices is None:
        return False
    return named_places(inventory, division.devices) is not None


def _check_strategy(strategy: Target | None, found: Sequence[Place]) -> None:
    if strategy is None:
        return
    if "slowdown" in strategy.arguments:
        raise ConfigError(
            "parallel.strategy.slowdown is set",
            remedy="give the device a slowdown in the hardware inventory",
        )
    slowed = [place.text for place in found if place.slowdown != 1]
    if slowed and "slowdown" not in strategy.parameters.types:
        raise ConfigError(
            f"{', '.join(slowed)} of the inventory are to be slower than they are, and "
            f"{strategy.path} takes no slowdown",
            remedy="let the strategy take a keyword 'slowdown' (those of sparsepipe.strategies "
            "do), or choose a hardware without",
        )


def order_of_devices(found: Sequence[Place], inventory: Inventory, *, nodes: int) -> list[int]:
    """The devices of the ranks by their places in the inventory; empty: in its own order.

    A run is another one where its stages lie on other devices.
    """
    if tuple(found) == places_for(inventory, None, ranks=len(found), nodes=nodes):
        return []
    there = places(inventory)
    return [there.index(place) for place in found]


def beside(found: Sequence[Place], inventory: Inventory, *, rank: int, nodes: int) -> list[Place]:
    """The devices of this rank's node, in the order of its processes."""
    by_node = ranks_of_nodes(found, inventory, nodes=nodes)
    return [found[other] for other in next(ranks for ranks in by_node if rank in ranks)]


def cuda_devices(
    found: Sequence[Place], inventory: Inventory, *, rank: int, nodes: int
) -> list[int]:
    """CUDA's numbers of the devices of this rank's node, in the order of its ranks.

    Raises:
        HardwareError: a device is not here.
    """
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return cuda_numbers(found, inventory, gpus, rank=rank, nodes=nodes)


def cuda_numbers(
    found: Sequence[Place], inventory: Inventory, gpus: Sequence[str], *, rank: int, nodes: int
) -> list[int]:
    """As :func:`cuda_devices`, by the names of this host's GPUs in CUDA's order.

    Raises:
        HardwareError: a device is not here.
    """
    here = beside(found, inventory, rank=rank, nodes=nodes)
    host = next(host for host in inventory.hosts if host.name == here[0].host)
    return gpu_indices(here, gpus, host=host)


_THREADS = "OMP_NUM_THREADS"


def find_device(inventory: Inventory, name: str | None) -> Place:
    """The first device of a kind.

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
            remedy=f"name the one to measure, such as task.device='{kinds[0]}'",
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
    host are in use, unless ``OMP_NUM_THREADS`` is set: a CPU's device is its share of the cores. A
    GPU becomes the current one.

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
    devices = [device for host in inventory.hosts for device in host.devices]
    found = next(device.memory_bytes for device in devices if device.name == place.name)
    return None if found is None else int(found)


def devices_beside(place: Place, inventory: Inventory) -> int:
    """Number of devices of the same host, this one included."""
    return sum(other.host == place.host for other in places(inventory))


def words_of_device(place: Place, inventory: Inventory) -> list[str]:
    """Properties of a device that its layer times depend on and inventories may lack."""
    share = max(1, usable_cores() // devices_beside(place, inventory))
    return [*words_of_machine(), f"{os.environ.get(_THREADS, share)} threads"]


def words_of_machine() -> list[str]:
    """Properties of this machine that measurements depend on and inventories may lack."""
    return [cpu_name(), f"torch {torch.__version__}", f"sparsepipe {__version__}"]


def without_links(inventory: Inventory) -> Inventory:
    """The inventory without links, on which the cost of layers does not depend."""
    hosts = tuple(replace(host, link=None) for host in inventory.hosts)
    return replace(inventory, hosts=hosts, link=None)
