"""The number of a run's ranks, their devices in the inventory, and the device to measure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsepipe import __version__
from sparsepipe.cluster import Inventory, Place, places_for
from sparsepipe.cluster.places import gpu_indices, named_places, places, ranks_of_nodes
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError, HardwareError, PlanError
from sparsepipe.planning.division import Division
from sparsepipe.strategies import check_grid
from sparsepipe.utils.host import cpu_name, usable_cores

_THREADS = "OMP_NUM_THREADS"


def num_ranks(spec: RunSpec, inventory: Inventory, division: Division | None) -> int:
    """Number of ranks on all nodes together, from the search, the plan or ``parallel.devices``."""
    parallel = spec.parallel
    if spec.search is not None:
        return _searched_devices(spec, inventory)
    planned = None if division is None else division.num_ranks
    nodes, devices = parallel.num_nodes, parallel.devices
    if nodes > 1 and planned and devices in ("auto", planned) and are_there(division, inventory):
        return planned  # hosts may have different numbers of them
    if devices == "auto" and nodes >= 1:
        devices = planned or nodes * inventory.devices_per_host(nodes)
    if not isinstance(devices, int) or devices < 1 or nodes < 1 or devices % nodes:
        by_plan = "" if planned is None else f" ({planned} by parallel.plan)"
        raise ConfigError(
            f"parallel.devices={parallel.devices}{by_plan} is not a positive multiple of "
            f"parallel.num_nodes={nodes}",
            remedy="set parallel.num_nodes to at least 1 and parallel.devices to auto or a "
            "multiple of it; a plan must be for such a multiple, or its file must name devices of "
            "the inventory",
        )
    if planned not in (None, devices):
        raise PlanError(
            f"parallel.plan is for {planned} device{'s' * (planned != 1)}, but parallel.devices="
            f"{devices}",
            remedy="set parallel.devices=auto, or give a plan for as many devices",
        )
    try:
        inventory.require(devices // nodes, num_hosts=nodes)
    except HardwareError as error:
        if planned is None:
            raise
        raise HardwareError(
            f"parallel.plan is for {planned} devices: {error.message}",
            remedy="give parallel.plan fewer devices, or choose other hardware; "
            f"hardware.cpu_devices={planned} lets processes share the cores of a CPU",
        ) from error
    if parallel.grid is not None and parallel.roles is None:
        check_grid(parallel.grid, replicas=parallel.replicas, ranks=devices)
    if parallel.strategy is None and devices > 1:
        raise ConfigError(
            f"parallel.devices={parallel.devices} means {devices} ranks, but no strategy is set",
            remedy="set parallel=dp or parallel.devices=1",
        )
    return devices


def _searched_devices(spec: RunSpec, inventory: Inventory) -> int:
    """Number of ranks of a run whose plan is searched for: one for each device of the inventory."""
    if spec.parallel.plan is None:
        raise ConfigError(
            "parallel.search is set, but the strategy does not split the model",
            remedy="choose parallel=hete_mp, mp or exact, or leave parallel.search out",
        )
    devices, nodes, hosts = spec.parallel.devices, spec.parallel.num_nodes, len(inventory.hosts)
    if hosts != nodes:
        raise ConfigError(
            "a searched plan uses all hosts of the inventory "
            f"({', '.join(host.name for host in inventory.hosts)}), but parallel.num_nodes={nodes}",
            remedy="start the command on each host with torchrun, with "
            f"parallel.num_nodes={hosts}, or choose hardware with as many hosts as nodes",
        )
    if devices not in ("auto", inventory.num_devices):
        raise ConfigError(
            f"parallel.devices={devices}, but a searched plan uses all {inventory.num_devices} "
            "devices of the inventory",
            remedy="set parallel.devices=auto and choose hardware with just the devices to use "
            "(hardware.cpu_devices for a CPU), or give a plan as parallel.plan",
        )
    return inventory.num_devices


def places_of_ranks(
    spec: RunSpec, inventory: Inventory, division: Division | None, *, ranks: int
) -> tuple[Place, ...]:
    """The device of each rank: the plan's if it names devices, else in the inventory's order."""
    devices = None if division is None else division.devices
    searched = division is not None and division.searched
    nodes, strategy = spec.parallel.num_nodes, spec.parallel.strategy
    found = places_for(inventory, devices, ranks=ranks, nodes=nodes, searched=searched)
    if strategy is None:
        return found
    if "slowdown" in strategy.arguments:
        raise ConfigError(
            "parallel.strategy.slowdown is set, but a slowdown belongs to a device",
            remedy="give the device a slowdown in the hardware inventory",
        )
    slowed = [place.text for place in found if place.slowdown != 1]
    if slowed and "slowdown" not in strategy.parameters.types:
        raise ConfigError(
            f"the inventory slows {', '.join(slowed)} down, but {strategy.path} does not take a "
            "slowdown",
            remedy="let the strategy take a keyword 'slowdown' (those of sparsepipe.strategies "
            "do), or choose hardware without a slowdown",
        )
    return found


def are_there(division: Division | None, inventory: Inventory) -> bool:
    """Whether the plan names devices and the inventory has all of them."""
    return named_places(inventory, (division and division.devices) or ()) is not None


def beside(found: Sequence[Place], inventory: Inventory, *, rank: int, nodes: int) -> list[Place]:
    """Devices of the ranks on ``rank``'s node, by local rank; ``found``: those of all ranks."""
    by_node = ranks_of_nodes(found, inventory, nodes=nodes)
    return [found[other] for other in next(ranks for ranks in by_node if rank in ranks)]


def cuda_devices(
    found: Sequence[Place],
    inventory: Inventory,
    *,
    rank: int,
    nodes: int,
    gpus: Sequence[str] | None = None,
) -> list[int]:
    """CUDA's indices of the devices of the ranks on the node of ``rank``, by local rank.

    ``gpus`` are the names of this host's GPUs in CUDA's order; None: the GPUs that torch finds.
    """
    if gpus is None:
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    here = beside(found, inventory, rank=rank, nodes=nodes)
    host = next(host for host in inventory.hosts if host.name == here[0].host)
    return gpu_indices(here, gpus, host=host)


def find_device(inventory: Inventory, name: str | None) -> Place:
    """The inventory's first device named ``name``; None: its first, if all have the same name."""
    there = places(inventory)
    kinds = list(dict.fromkeys(place.name for place in there))
    if name is None and len(kinds) > 1:
        raise ConfigError(
            f"the inventory has several kinds of devices: {', '.join(kinds)}",
            remedy=f"name the kind to measure, such as task.device='{kinds[0]}'",
        )
    if not kinds or name not in (None, *kinds):
        raise ConfigError(
            f"the inventory has no device{f' named {name}' if name else ''}",
            remedy="list it in the hardware inventory, or set task.device to one listed there: "
            f"{', '.join(kinds) or 'now none'}",
        )
    return next(place for place in there if name in (None, place.name))


def prepare_device(place: Place, inventory: Inventory) -> torch.device:
    """Prepares this process to compute on a device, and returns it as a ``torch.device``.

    A GPU becomes the current one. Unless ``OMP_NUM_THREADS`` is set, the process gets as many
    threads as a rank has when all devices of the host are in use: an equal share of the cores.
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
    """Number of devices on the host of ``place``, including ``place``."""
    return sum(other.host == place.host for other in places(inventory))


def words_of_device(place: Place, inventory: Inventory) -> list[str]:
    """Texts about this machine and the number of threads of a device, on which layer times depend
    but which inventories may lack.
    """
    share = max(1, usable_cores() // devices_beside(place, inventory))
    return [*words_of_machine(), f"{os.environ.get(_THREADS, share)} threads"]


def words_of_machine() -> list[str]:
    """Texts about this machine on which measurements depend but which inventories may lack."""
    return [cpu_name(), f"torch {torch.__version__}", f"sparsepipe {__version__}"]


def without_links(inventory: Inventory) -> Inventory:
    """The inventory without its links, since the cost of layers does not depend on them."""
    hosts = tuple(replace(host, link=None) for host in inventory.hosts)
    return replace(inventory, hosts=hosts, link=None)
