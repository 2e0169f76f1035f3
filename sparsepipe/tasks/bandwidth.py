"""The task ``bandwidth``: how fast the devices of an inventory send data to each other."""

from __future__ import annotations

import logging
import math
import socket
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from sparsepipe.cluster import Inventory, Link
from sparsepipe.cluster.places import ranks_of_nodes
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.target import Target
from sparsepipe.errors import HardwareError
from sparsepipe.partition.costs.model import cost_model
from sparsepipe.partition.devices import DeviceKind, DevicePool
from sparsepipe.planning.devices import words_of_machine
from sparsepipe.runtime.bandwidth import (
    Benchmark,
    MessageTime,
    ReductionTime,
    TimingBudget,
    groups_of,
    pairs_of,
    time_pairs,
    time_reductions,
)
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import markdown_table, write_csv, write_json, write_text_atomic
from sparsepipe.utils.host import usable_cores

log = logging.getLogger(__name__)


SIZES_BYTES = (2**16, 2**20, 2**23, 2**26)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(Task):
    """Times messages between ranks and sums over groups of ranks, with one rank on each device.

    ``conf/task/bandwidth.yaml`` describes the settings.
    """

    chooses_devices: ClassVar[bool] = True

    sizes_bytes: Annotated[list[Annotated[int, Field(ge=4)]], Field(min_length=1)] | None = None
    repeats: Annotated[int, Field(ge=1)] = 20
    warmups: Annotated[int, Field(ge=0)] = 3
    most_s: Annotated[float, Field(ge=0)] = 3.0
    timeout_s: Annotated[float, Field(ge=1)] = 300.0
    all_pairs_up_to: Annotated[int, Field(ge=2)] = 8
    direct: bool = False

    def run(self, run: ResolvedRun) -> None:
        """Measures the links; writes ``bandwidth.json``, ``bandwidth.csv``, ``hardware.yaml``."""
        sizes = sorted({*(SIZES_BYTES if self.sizes_bytes is None else self.sizes_bytes)})
        effort = TimingBudget(
            repeats=self.repeats, warmups=self.warmups, most_s=self.most_s, timeout_s=self.timeout_s
        )
        nodes = int(run.spec.parallel.num_nodes)
        by_node = ranks_of_nodes(run.places, run.inventory, nodes=nodes)
        node_of = [next(n for n in range(nodes) if r in by_node[n]) for r in range(run.ranks)]
        hostnames = process_group.gather_objects(socket.gethostname(), what="gathering host names")
        firsts = [ranks[0] for ranks in by_node]
        names = [run.places[first].host for first in firsts]
        if len({*names}) < len(names):  # as where one host stands for all nodes
            own = [hostnames[first] for first in firsts]
            alike = len({*own}) < len(own)
            names = [f"{names[0]}-{node}" for node in range(nodes)] if alike else own
        host_of = [names[node] for node in node_of]
        pairs = pairs_of(node_of, all_up_to=self.all_pairs_up_to)
        possible = run.ranks * (run.ranks - 1) // 2
        log.info("timing %d of %d pairs of ranks (task.all_pairs_up_to)", len(pairs), possible)
        device = run.own_device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        bench = Benchmark(effort, device=device, direct=self.direct)
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
        if process_group.rank() == 0:
            path = run.directory.path
            log.info("%s", as_text(links))
            write_json(path / "bandwidth.json", as_json(links))
            write_csv(path / "bandwidth.csv", as_rows(links))
            write_text_atomic(path / "hardware.yaml", links.put_into(run.inventory).to_yaml())
            log.info("for other runs: hardware=file hardware.source=%s", path / "hardware.yaml")
        values: dict[str, Any] = {"model": None, "strategy": None}  # links depend on neither
        named = {f"inside/{host}": link for host, link in links.inside.items()}
        if links.between is not None:
            named["between"] = links.between
        for name, link in named.items():
            values[f"{name}/bytes_per_s"] = link.bytes_per_s
            values[f"{name}/latency_s"] = link.latency_s
        largest = max(
            links.reductions, key=lambda r: (len(r.ranks), r.how == "all_reduce", r.size_bytes)
        )
        values["all_reduce_s"] = largest.seconds
        values["all_reduce_over_eq4"] = largest.seconds / links.eq4_s(largest)
        write_result(run, values)

    def prepare(self, run: ResolvedRun) -> str:
        """Returns hosts' names and facts about this machine: links do not depend on data."""
        hosts = [host.name for host in run.inventory.hosts]
        return ", ".join([*hosts, *words_of_machine(), f"{usable_cores()} cores"])

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """Returns the configuration with one rank on each device of every node."""
        given = spec.parallel
        several = len(inventory.hosts) > 1
        nodes = len(inventory.hosts) if several else given.num_nodes
        devices = inventory.num_devices if several else nodes * inventory.num_devices
        if devices < 2:
            raise HardwareError(
                "a link joins two devices, but the inventory has only one",
                remedy="choose hardware with several devices, or let two processes share the cores "
                "of a CPU with hardware.cpu_devices=2",
            )
        backend = given.argument("process_group_backend")
        settings = {"timeout_s": self.timeout_s, "process_group_backend": backend}
        return spec.replace(
            parallel={
                "devices": devices,
                "num_nodes": nodes,
                "grace_s": given.grace_s,
                "max_restarts": given.max_restarts,
                "strategy": Target("sparsepipe.strategies.DataParallelStrategy", settings),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measured links between ranks.

    Args:
        host_of: name of the host of each rank, in the order of ranks.
        sendings: times of messages from rank to rank, one way or both ways at once, by size.
        reductions: times of sums over groups of ranks, by size.
    """

    host_of: Sequence[str]
    sendings: Sequence[MessageTime]
    reductions: Sequence[ReductionTime]

    def over(self, host: str | None) -> list[MessageTime]:
        """Returns times of the largest one-way messages within ``host``; None: between hosts."""
        most = max(sending.size_bytes for sending in self.sendings)
        found = []
        for sending in self.sendings:
            hosts = {self.host_of[sending.source], self.host_of[sending.target]}
            there = len(hosts) == 2 if host is None else hosts == {host}
            if there and sending.size_bytes == most and not sending.both_ways:
                found.append(sending)
        return found

    def _link(self, host: str | None) -> Link | None:
        if not (found := self.over(host)):
            return None
        rates, latencies = [s.bytes_per_s for s in found], [s.latency_s for s in found]
        # No link is measured more exactly than to four digits.
        return Link(
            bytes_per_s=float(f"{statistics.median(rates):.4g}"),
            latency_s=float(f"{statistics.median(latencies):.4g}"),
        )

    @property
    def inside(self) -> dict[str, Link]:
        """The link inside each host with several ranks (median of its pairs), by host name."""
        found = {host: self._link(host) for host in dict.fromkeys(self.host_of)}
        return {host: link for host, link in found.items() if link is not None}

    @property
    def between(self) -> Link | None:
        """The link between hosts (median of pairs); None: all ranks are on one host."""
        return self._link(None)

    def eq4_s(self, reduction: ReductionTime) -> float:
        """Returns the seconds that the partitioner expects this sum to take, by Eq. 4."""
        inside, between = self.inside, self.between
        names = dict.fromkeys(self.host_of)
        pool = DevicePool(
            kinds=tuple(DeviceKind(name=n, host=n, count=self.host_of.count(n)) for n in names),
            inside={n: inside[n].bytes_per_s if n in inside else math.inf for n in names},
            between=math.inf if between is None else between.bytes_per_s,
        )
        hosts = [self.host_of[rank] for rank in reduction.ranks]
        slowest = pool.sync_bytes_per_s([hosts.count(kind.host) for kind in pool.kinds])
        return cost_model("eq4").sync_s(
            reduction.size_bytes, replicas=len(hosts), bytes_per_s=slowest
        )

    def put_into(self, inventory: Inventory) -> Inventory:
        """Returns the inventory with the links that were measured; a single host that stands for
        several nodes is replaced by a copy for each node.
        """
        hosts = inventory.hosts
        if len(hosts) == 1:
            hosts = tuple(replace(hosts[0], name=name) for name in dict.fromkeys(self.host_of))
        inside = self.inside
        return Inventory(
            hosts=tuple(replace(host, link=inside.get(host.name, host.link)) for host in hosts),
            link=self.between or inventory.link,
        )


def as_json(links: Links) -> dict[str, Any]:
    """Returns all measurements, for ``bandwidth.json``."""
    between = links.between
    return {
        "hosts": {host: asdict(link) for host, link in links.inside.items()},
        "between": None if between is None else asdict(between),
        "pairs": [
            {
                "source": s.source,
                "target": s.target,
                "source_host": links.host_of[s.source],
                "target_host": links.host_of[s.target],
                "bytes": s.size_bytes,
                "both_ways": s.both_ways,
                "seconds": s.seconds,
                "bytes_per_s": s.bytes_per_s,
                "latency_s": s.latency_s,
                "repeats": s.repeats,
            }
            for s in links.sendings
        ],
        "all_reduce": [
            {
                "ranks": list(r.ranks),
                "hosts": list(dict.fromkeys(links.host_of[rank] for rank in r.ranks)),
                "how": r.how,
                "bytes": r.size_bytes,
                "seconds": r.seconds,
                "eq4_s": links.eq4_s(r),
                "over_eq4": r.seconds / links.eq4_s(r),
                "repeats": r.repeats,
            }
            for r in links.reductions
        ],
    }


def as_rows(links: Links) -> list[dict[str, Any]]:
    """Returns a row for each measurement, for ``bandwidth.csv``."""
    values, rows = as_json(links), []
    for pair in values["pairs"]:
        ends = dict.fromkeys((pair["source_host"], pair["target_host"]))
        what = "both ways" if pair["both_ways"] else "one way"
        ranks = f"{pair['source']} {pair['target']}"
        rows.append({**pair, "what": what, "ranks": ranks, "hosts": " ".join(ends)})
    for entry in values["all_reduce"]:
        joined = {name: " ".join(map(str, entry[name])) for name in ("ranks", "hosts")}
        rows.append({**entry, "what": entry["how"], **joined})
    columns = ("what", "ranks", "hosts", "bytes", "seconds", "bytes_per_s", "latency_s", "eq4_s",
               "over_eq4", "repeats")  # fmt: skip
    return [{column: row.get(column) for column in columns} for row in rows]


def as_text(links: Links) -> str:
    """Formats the times of the largest messages and of all sums as tables, and a line per link."""
    most = max(sending.size_bytes for sending in links.sendings)
    largest = [s for s in links.sendings if s.size_bytes == most]
    both = {frozenset((s.source, s.target)): s.bytes_per_s for s in largest if s.both_ways}
    pairs = [
        (
            f"{s.source} to {s.target}",
            " to ".join(dict.fromkeys((links.host_of[s.source], links.host_of[s.target]))),
            f"{s.bytes_per_s / 1e6:,.1f}",
            f"{both[frozenset((s.source, s.target))] / 1e6:,.1f}",
            f"{1e6 * s.latency_s:,.0f}",
        )
        for s in largest
        if not s.both_ways
    ]
    sums = [
        (
            " ".join(map(str, r.ranks)),
            r.how,
            f"{r.size_bytes:,}",
            f"{1e3 * r.seconds:,.2f}",
            f"{1e3 * links.eq4_s(r):,.2f}",
            f"{r.seconds / links.eq4_s(r):.2f}",
        )
        for r in links.reductions
    ]
    parts = [
        f"messages of {most:,} bytes; bandwidth.csv has the others",
        markdown_table(("ranks", "host", "MB/s", "each way at once", "latency us"), pairs),
        "sums over ranks",
        markdown_table(("ranks", "how", "bytes", "ms", "Eq. 4 ms", "ratio"), sums),
    ]
    found: list[tuple[str | None, Link]] = [*links.inside.items()]
    if links.between is not None:
        found.append((None, links.between))
    for host, link in found:
        rates = [sending.bytes_per_s / 1e6 for sending in links.over(host)]
        parts.append(
            f"{'between hosts' if host is None else f'inside {host}'}: "
            f"{link.bytes_per_s / 1e6:,.4g} MB/s (median of {min(rates):,.4g} to "
            f"{max(rates):,.4g}), latency {1e6 * link.latency_s:,.4g} us"
        )
    return "\n".join(parts)
