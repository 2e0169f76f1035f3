"""Renumbering of the ranks under an outer launcher, to match a plan on several hosts.

A launcher numbers processes node after node, but a plan numbers its devices stage after stage. The
numbers differ if a stage is on a later host than the next stage, or on several hosts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.cluster.places import ranks_of_nodes
from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.runs.logs import configure
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.task import ResolvedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that a launcher has started.

    Args:
        node: index of its node, from 0.
        host: name of its host.
        local: its local rank, which counts from 0 on each node.
        beside: number of processes on the node, including this one.
    """

    node: int
    host: str
    local: int
    beside: int


def renumber(run: ResolvedRun) -> None:
    """Gives this process a rank whose device is on its node, and leaves the process group.

    All ranks must call it. Each joins the group again later, with the device of its new rank.
    """
    before = list(range(process_group.world_size()))
    numbers, plan, inventory = before, run.directory.plan, run.inventory
    nodes = run.spec.parallel.num_nodes
    if nodes > 1 and len(inventory.hosts) > 1:
        me = Process(
            node=int(os.environ.get("GROUP_RANK", "0")),
            host=socket.gethostname(),
            local=process_group.local_rank(),
            beside=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        everyone = process_group.gather_objects((me, plan.exists()))
        if len({sees for _, sees in everyone}) > 1:
            raise ConfigError(
                f"not every node sees the plan {plan}",
                remedy="set paths.outputs to a directory that all nodes share",
            )
        # Otherwise each host uses some of its devices, and any node may be any host.
        if run.division is not None or run.ranks == inventory.num_devices:
            by_node = ranks_of_nodes(run.places, inventory, nodes=nodes)
            hosts = [run.places[of_node[0]].host for of_node in by_node]
            numbers = new_ranks([process for process, _ in everyone], by_node, hosts)
    process_group.renumber(numbers)
    if numbers != before:
        configure()  # another process is rank 0 now


def new_ranks(
    processes: Sequence[Process], by_node: Sequence[Sequence[int]], hosts: Sequence[str]
) -> list[int]:
    """Returns the new rank of each process.

    Nodes are matched with the hosts of the inventory by name if all names agree, else in order.

    Args:
        processes: the processes, in the order of their present ranks.
        by_node: new ranks on each host, in the order of ``hosts``.
        hosts: names in the inventory of the hosts that the run uses.
    """
    names = {process.node: process.host for process in processes}
    known = sorted(names.values()) == sorted(hosts)
    host_of = {node: hosts.index(name) if known else node for node, name in names.items()}
    found = []
    for process in processes:
        host = host_of[process.node]
        if len(names) != len(hosts) or process.beside != len(by_node[host]):
            expected = ", ".join(
                f"{len(ranks)} on {name}" for name, ranks in zip(hosts, by_node, strict=True)
            )
            raise PlanError(
                f"the number of processes on node {process.node} ({process.host}) of {len(names)} "
                f"is {process.beside}, but the run needs {expected}",
                remedy="start torchrun on each host with as many processes (--nproc-per-node) as "
                "the run uses devices there, with the host names or the order (--node-rank) of the "
                "inventory",
            )
        found.append(by_node[host][process.local])
    return found
