"""The network between the hosts of an emulated training, where this process may make one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.emulate import NotPermitted, clear, emulated_hosts, told_to_ranks
from sparsepipe.planning.placing import places_of_ranks
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.run import num_ranks

log = logging.getLogger(__name__)


@contextmanager
def hosts_emulated(spec: RunSpec, inventory: Inventory, directory: RunDir) -> Iterator[None]:
    """Ranks that are started within live on hosts of their own.

    Makes none where nothing is emulated, or all ranks are on one host. Where this process may
    not make hosts, all ranks stay on this machine, which is told, unless ``hardware.network``
    insists. Whatever is emulated, first goes what killed processes have left of clusters.

    Args:
        spec: the configuration.
        inventory: the hardware.
        directory: of the run, whose plan is settled.

    Raises:
        HardwareError: they cannot be made.
    """
    emulation = spec.emulation
    if emulation is not None:
        clear()
    with ExitStack() as stack:
        if emulation is not None and emulation.network != "loopback":
            places = places_of_ranks(
                spec, inventory, ranks=num_ranks(spec, inventory), kept=directory.plan
            )
            names = [place.host for place in places]
            used = tuple(host for host in inventory.hosts if host.name in names)
            if len(used) > 1:
                try:
                    layout = stack.enter_context(
                        emulated_hosts(
                            replace(inventory, hosts=used), time_scale=emulation.time_scale
                        )
                    )
                    stack.enter_context(told_to_ranks(layout, names))
                except NotPermitted as error:
                    if emulation.network == "namespaces":
                        raise
                    log.warning(
                        "the network between hosts is not emulated, its links are as fast as "
                        "this machine's loopback: %s; %s",
                        error.message,
                        error.remedy,
                    )
        yield
