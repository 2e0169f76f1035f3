"""Whether a configuration leaves the plan to a search: ``parallel.search``."""

from __future__ import annotations

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError


def searched_devices(spec: RunSpec, inventory: Inventory) -> int:
    """Processes of a run whose plan is searched for: one for each device that there is.

    Raises:
        ConfigError: other numbers of devices or nodes are asked for, or no model is split.
    """
    if spec.parallel.plan is None:
        raise ConfigError(
            "parallel.search is set where no model is split",
            remedy="choose parallel=hete_mp, mp or exact, or leave parallel.search out",
        )
    devices, nodes = spec.parallel.devices, spec.parallel.num_nodes
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
