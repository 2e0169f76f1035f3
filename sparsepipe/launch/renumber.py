"""Ranks under an outer launcher, numbered as the plan has them on the hosts of an inventory.

A launcher numbers processes node after node, a plan its devices stage after stage: where a stage
lies on a later host than the one after it, or on several, the two differ.
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
    """Node and host of a process, its local rank, and the number of processes on its node."""

    node: int
    host: str
    local: int
    beside: int


def renumber(run: ResolvedRun) -> None:
    """Makes this process the rank whose device is on its node, and leaves the process group.

    Every rank must call it. Only as that rank does it know its device, with which it joins anew.
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
        # Else some devices of each host compute, whichever: no node has to be a certain host.
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
    """The rank that each process is to be.

    Nodes are matched with hosts by their names if all of these agree, else in order.
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
                f"node {process.node} ({process.host}) of {len(names)} has {process.beside} "
                f"processes; there are to be {expected}",
                remedy="start torchrun on each host with as many processes (--nproc-per-node) as "
                "devices are used there; nodes are numbered as hosts in the inventory, or are "
                "called like them",
            )
        found.append(by_node[host][process.local])
    return found
