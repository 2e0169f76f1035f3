"""The task ``bandwidth``: how fast the devices of an inventory talk to each other."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparsepipe.cluster import Inventory, Place
from sparsepipe.cluster.places import ranks_of_nodes
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError, HardwareError
from sparsepipe.planning.links import Links, as_json, as_rows, as_text, doubts
from sparsepipe.planning.measured_device import words_of_machine
from sparsepipe.planning.placing import cuda_devices
from sparsepipe.runtime.bandwidth import (
    Benchmark,
    TimingBudget,
    groups_of,
    pairs_of,
    time_pairs,
    time_reductions,
)
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import Run, Task
from sparsepipe.utils.files import write_json, write_text_atomic
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.tables import write_csv

log = logging.getLogger(__name__)

SIZES_BYTES = (2**16, 2**20, 2**23, 2**26)
_LEAST = {"repeats": 1, "warmups": 0, "most_s": 0, "timeout_s": 1, "all_pairs_up_to": 2}
"""The smallest values of settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(Task):
    """Times messages and sums between ranks, on all devices of the inventory.

    Attributes:
        sizes_bytes: of messages and sums; None: 64 KiB to 64 MiB.
        repeats: of each measurement, that count.
        warmups: before those.
        most_s: a measurement that has taken longer is not repeated any more.
        timeout_s: limit of every wait for another rank.
        all_pairs_up_to: ranks; of more, one pair for each link is timed.
        direct: messages go from CUDA device to CUDA device over NCCL.
    """

    chooses_devices: ClassVar[bool] = True

    sizes_bytes: list[int] | None = None
    repeats: int = 20
    warmups: int = 3
    most_s: float = 3.0
    timeout_s: float = 300.0
    all_pairs_up_to: int = 8
    direct: bool = False

    def run(self, run: Run) -> None:
        """Measures; writes ``bandwidth.json`` and ``hardware.yaml``.

        Raises:
            TransportError: a rank is gone or does not answer.
            Stopped: a signal ended it.
        """
        sizes = sorted({*(SIZES_BYTES if self.sizes_bytes is None else self.sizes_bytes)})
        effort = TimingBudget(
            repeats=self.repeats,
            warmups=self.warmups,
            most_s=self.most_s,
            timeout_s=self.timeout_s,
        )
        nodes = int(run.spec.parallel.num_nodes)
        by_node = ranks_of_nodes(run.places, run.inventory, nodes=nodes)
        node_of = [next(n for n in range(nodes) if r in by_node[n]) for r in range(run.ranks)]
        host_of = _host_names(run.places, node_of)
        pairs = pairs_of(node_of, all_up_to=self.all_pairs_up_to)
        _log_pairs(len(pairs), run.ranks, all_pairs_up_to=self.all_pairs_up_to)
        bench = Benchmark(effort, device=_device(run, nodes), direct=self.direct)
        sendings = process_group.gather_objects(time_pairs(bench, pairs, sizes))
        groups = groups_of(node_of)
        reductions = process_group.gather_objects(time_reductions(bench, groups, sizes))
        bench.close()
        links = Links(
            host_of=host_of,
            sendings=sorted(
                (sending for of_rank in sendings for sending in of_rank),
                key=lambda s: (s.source, s.target, s.both_ways, s.size_bytes),
            ),
            reductions=[reduction for of_rank in reductions for reduction in of_rank],
        )
        _write(run, links)

    def prepare(self, spec: RunSpec, inventory: Inventory) -> str:
        """Which hosts: links belong to them and to what moves bytes, not to what is computed there.

        Raises:
            ConfigError: a setting of the task cannot be.
        """
        del spec
        self._check()
        hosts = [host.name for host in inventory.hosts]
        return ", ".join([*hosts, *words_of_machine(), f"{usable_cores()} cores"])

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """All devices of the inventory, whatever the configuration trains on.

        Raises:
            HardwareError: there is one device only.
        """
        given = spec.parallel
        several = len(inventory.hosts) > 1
        nodes = len(inventory.hosts) if several else given.num_nodes
        devices = inventory.num_devices if several else nodes * inventory.num_devices
        if devices < 2:
            raise HardwareError(
                "links are between devices, and the inventory has one",
                remedy="choose a hardware with several; hardware.cpu_devices=2 lets two processes "
                "share the cores of a CPU",
            )
        strategy = Target(
            "sparsepipe.strategies.DataParallelStrategy",
            {
                "timeout_s": self.timeout_s,
                "process_group_backend": given.argument("process_group_backend"),
            },
        )
        parallel = {
            "devices": devices,
            "num_nodes": nodes,
            "grace_s": given.grace_s,
            "max_restarts": given.max_restarts,
            "strategy": strategy,
        }
        return spec.replace(parallel=parallel)

    def _check(self) -> None:
        sizes = self.sizes_bytes
        if sizes is not None and not (sizes and all(type(s) is int and s >= 4 for s in sizes)):
            raise ConfigError(
                f"task.sizes_bytes={sizes} are no sizes of messages",
                remedy="give a list of whole numbers of bytes, 4 or more, such as "
                "[65536, 67108864]",
            )
        for name, limit in _LEAST.items():
            if (value := getattr(self, name)) < limit:
                raise ConfigError(
                    f"task.{name}={value} is too little", remedy=f"set it to {limit} or more"
                )


def _log_pairs(count: int, ranks: int, *, all_pairs_up_to: int) -> None:
    chosen = ": one inside each host, one between any two (task.all_pairs_up_to)"
    some = "" if ranks <= all_pairs_up_to else chosen
    log.info("timing %d of %d pairs of ranks%s", count, ranks * (ranks - 1) // 2, some)


def _host_names(places: Sequence[Place], node_of: Sequence[int]) -> list[str]:
    """What the host of each rank is called.

    A single host of an inventory may stand for several nodes: these are called as they call
    themselves.
    """
    said = process_group.gather_objects(socket.gethostname(), what="hearing how hosts are called")
    nodes = sorted({*node_of})
    names = [places[node_of.index(node)].host for node in nodes]
    if len({*names}) < len(names):
        own = [said[node_of.index(node)] for node in nodes]
        names = own if len({*own}) == len(own) else [f"{names[0]}-{node}" for node in nodes]
    return [names[node] for node in node_of]


def _device(run: Run, nodes: int) -> torch.device:
    if run.inventory.accelerator != "cuda":
        return torch.device("cpu")
    here = cuda_devices(run.places, run.inventory, rank=process_group.rank(), nodes=nodes)
    device = torch.device("cuda", here[process_group.local_rank()])
    torch.cuda.set_device(device)
    return device


def _write(run: Run, links: Links) -> None:
    """Every rank must call it; rank 0 writes."""
    values: dict[str, Any] = {"model": None, "strategy": None}  # links belong to none
    for host, link in links.inside.items():
        values[f"inside/{host}/bytes_per_s"] = link.bytes_per_s
        values[f"inside/{host}/latency_s"] = link.latency_s
    if links.between is not None:
        values["between/bytes_per_s"] = links.between.bytes_per_s
        values["between/latency_s"] = links.between.latency_s
    largest = max(
        links.reductions, key=lambda r: (len(r.ranks), r.how == "all_reduce", r.size_bytes)
    )
    values["all_reduce_s"] = largest.seconds
    values["all_reduce_over_eq4"] = largest.seconds / links.eq4_s(largest)
    if process_group.rank() == 0:
        path = run.directory.path
        log.info("%s", as_text(links))
        for doubt in doubts(links):
            log.warning("%s", doubt)
        write_json(path / "bandwidth.json", as_json(links))
        write_csv(path / "bandwidth.csv", as_rows(links))
        write_text_atomic(path / "hardware.yaml", links.put_into(run.inventory).to_yaml())
        log.info("for other runs: hardware=file hardware.source=%s", path / "hardware.yaml")
    write_result(run, values)
