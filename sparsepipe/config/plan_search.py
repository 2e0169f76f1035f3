"""Whether a configuration leaves the plan to a search: ``parallel.search``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.schema import Measuring, SearchChoice
from sparsepipe.errors import ConfigError


def search_of(config: Mapping[str, Any]) -> SearchChoice | None:
    """The search for a plan; None where none is to be found, or ``parallel.plan`` says one.

    Args:
        config: resolved and checked.
    """
    node, plan = config["parallel"].get("search"), config["parallel"].get("plan") or {}
    if (
        node is None
        or node.get("search", "") is None
        or any(plan.get(name) is not None for name in ("file", "config", "cuts"))
    ):
        return None
    measure = Measuring(**(node.get("measure") or {}))
    return SearchChoice(**{**node, "measure": measure})


def searched_plan_of(config: Mapping[str, Any]) -> SearchChoice | None:
    """The search of a run that splits its model; None where there is none, or nothing is split.

    Emulated data parallelism leaves the settings of searches alone, so that a sweep over strategies
    may have them; so does simulated. Trainings refuse them (:func:`searched_devices`).

    Args:
        config: resolved and checked.
    """
    return None if config["parallel"].get("plan") is None else search_of(config)


def searched_devices(config: Mapping[str, Any], inventory: Inventory) -> int:
    """Processes of a run whose plan is searched for: one for each device that there is.

    Raises:
        ConfigError: other numbers of devices or nodes are asked for, or no model is split.
    """
    if config["parallel"].get("plan") is None:
        raise ConfigError(
            "parallel.search is set where no model is split",
            remedy="choose parallel=hete_mp, mp or exact, or leave parallel.search out",
        )
    devices, nodes = config["parallel"]["devices"], config["parallel"]["num_nodes"]
    hosts = inventory.hosts
    if len(hosts) != nodes:
        remedy = (
            f"start the command on each host by torchrun, with parallel.num_nodes={len(hosts)}"
            if len(hosts) > 1
            else "list all hosts in a hardware inventory, or set parallel.num_nodes=1"
        )
        raise ConfigError(
            f"the plan is searched for the {len(hosts)} hosts of the inventory "
            f"({', '.join(host.name for host in hosts)}), and parallel.num_nodes={nodes}",
            remedy=f"{remedy}; or choose another hardware",
        )
    if devices not in ("auto", inventory.num_devices):
        raise ConfigError(
            f"parallel.devices={devices}, and the plan is searched for all "
            f"{inventory.num_devices} devices of the inventory",
            remedy="set parallel.devices=auto and choose a hardware with the devices to use "
            "(hardware.cpu_devices for a CPU), or give a plan as parallel.plan",
        )
    return inventory.num_devices
