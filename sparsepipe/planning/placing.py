"""Which device of the inventory each rank of a run computes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsepipe.cluster import Inventory, Place, places_for
from sparsepipe.cluster.places import gpu_indices, named_places, places, ranks_of_nodes
from sparsepipe.config.division import Division, division_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError


def places_of_ranks(
    spec: RunSpec, inventory: Inventory, *, ranks: int, kept: Path | None = None
) -> tuple[Place, ...]:
    """The device of each rank: as the plan says, else in the inventory's order.

    Args:
        spec: the configuration.
        inventory: the hardware.
        ranks: of the run, over all nodes.
        kept: the plan with which the run has begun, if it has.

    Raises:
        ConfigError: one is made slower, and the strategy cannot do that, or is told by hand.
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
    """Whether a plan names devices, and the inventory has them all."""
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
    """The devices of this rank's node, in the order of its processes.

    Args:
        found: the device of each rank.
        inventory: the hardware.
        rank: this one's number.
        nodes: of the run.
    """
    by_node = ranks_of_nodes(found, inventory, nodes=nodes)
    return [found[other] for other in next(ranks for ranks in by_node if rank in ranks)]


def cuda_devices(
    found: Sequence[Place], inventory: Inventory, *, rank: int, nodes: int
) -> list[int]:
    """CUDA's numbers of the devices of this rank's node, in the order of its ranks.

    Args:
        found: the device of each rank.
        inventory: the hardware.
        rank: this one's number.
        nodes: of the run.

    Raises:
        HardwareError: a device is not here.
    """
    import torch

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
