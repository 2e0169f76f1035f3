"""How long replicas take to sum their gradients: in a chain, directly, and torch's all_reduce.

Processes of one thread each, over gloo. First all on loopback, where cores are the limit; then on
two hosts as network namespaces of this machine (``sparsepipe.emulate``, needs root), joined at a
limited bandwidth, as ranks of a stage whose devices are on two servers.

- *direct* and *chain*: the two ways of ``OrderedSum``, whose bits are the same; this is checked.
- *all_reduce*: torch's ring, whose bits differ from rank order's; for comparison.

The three take turns; medians of the slowest rank's time are printed, and ratios in one run. On the
link, *of the link* is the vector's bytes over the bandwidth: what a chain cannot go below. After
each size follows the way that replicas take of themselves, and how much longer that took than the
better one.

    python benchmarks/ordered_sum.py
    python benchmarks/ordered_sum.py --only link --hosts 4 3 --link-bytes-per-s 125e6
    python benchmarks/ordered_sum.py --only link --hosts 2 1 --mib 0.25 1 2 4 8
    python benchmarks/ordered_sum.py --only link --mib 16 --chunk-kib 64 256 1024 4096 --room 4
    python benchmarks/ordered_sum.py --only link --mib 16 --chunk-kib 1024 --room 1 2 4 8
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from pipeline_ranks import RankFailed, on_ranks

from sparsepipe.cluster import Device, Host, Inventory, Link
from sparsepipe.emulate import announce_hosts, emulated_hosts, enter_host
from sparsepipe.emulate.layout import Layout
from sparsepipe.errors import SparsePipeError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.ordered_sum import OrderedSum
from sparsepipe.runtime.failures.missing_ranks import collective, new_group
from sparsepipe.schedule.communication import way_of

CPU = torch.device("cpu")
TIMEOUT_S = 600.0
LIMIT_S = 7200.0
"""Of all sizes in one place."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Place:
    """Where ranks are.

    Attributes:
        hosts: of each rank.
        link_bytes_per_s: between any two hosts; None: there is no link.
        layout: of hosts that have a network of their own.
    """

    hosts: tuple[str, ...]
    link_bytes_per_s: float | None = None
    layout: Layout | None = None


class Way:
    """A way of summing, and its vector.

    Args:
        total: an ordered sum.
        run: sums.
    """

    def __init__(self, total: OrderedSum, run: Callable[[], None]) -> None:
        self._total, self._run = total, run
        self.values = total.values

    def __call__(self, rank: int) -> float:
        """Sums once; seconds of this rank from when all begin."""
        self.values.fill_(1.0 + 1e-3 * rank)
        self.values[0] = 10.0**-rank
        dist.barrier()
        started_s = time.perf_counter()
        self._run()
        return time.perf_counter() - started_s


def ways_of(
    made: dist.ProcessGroup,
    length: int,
    chunks_kib: Sequence[int | None],
    rooms: Sequence[int | None],
) -> dict[str, Way]:
    """All ways by their names.

    Args:
        made: the ranks.
        length: of the vector.
        chunks_kib: what goes through a chain together, one for each chain; None: its own rule.
        rooms: partial sums that may lie at a rank of a chain, the same.
    """

    def total(**settings: Any) -> OrderedSum:
        return OrderedSum(made, length=length, dtype=torch.float32, device=CPU, **settings)

    direct = total(way="direct")
    found = {"direct": Way(direct, direct.reduce)}
    for kib, room in product(chunks_kib, rooms):
        chain = total(way="chain", chunk=None if kib is None else kib * 1024 // 4, room=room)
        size = "" if kib is None else f", {kib} KiB"
        name = f"chain{size}" + ("" if room is None else f", room {room}")
        found[name] = Way(chain, chain.reduce)
    # In the memory of the direct way: there is no other sum under way.
    found["all_reduce"] = Way(direct, lambda: dist.all_reduce(direct.values, group=made))
    return found


def times_ms(ways: dict[str, Way], *, rank: int, repeats: int) -> dict[str, float]:
    """Median of the slowest rank's time; the first round warms up.

    Raises:
        SystemExit: two ways have other bits.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    sums: dict[str, torch.Tensor] = {}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            taken = torch.tensor(way(rank))
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if repeat:
                found[name].append(1000 * float(taken))
            else:
                sums[name] = way.values[:: max(1, len(way.values) // 1000)].clone()
    if not all(torch.equal(sums[name], sums["direct"]) for name in ways if name != "all_reduce"):
        raise SystemExit("the ways have summed to other bits")
    return {name: statistics.median(values) for name, values in found.items()}


def measure(rank: int, options: argparse.Namespace, place: Place) -> None:
    """What each rank does, on its host; rank 0 prints.

    Raises:
        HardwareError: its host is gone.
    """
    there = place.layout
    with nullcontext() if there is None else announce_hosts(there, place.hosts):
        enter_host()
        process_group.join("gloo", timeout_s=TIMEOUT_S)
        made = new_group(list(range(len(place.hosts))), backend="gloo", timeout_s=TIMEOUT_S)
        for mib in options.mib:
            with collective(f"sums of {mib:g} MiB", made):
                ways = ways_of(
                    made, int(mib * MIB / 4), options.chunk_kib or [None], options.room or [None]
                )
                found = times_ms(ways, rank=rank, repeats=options.repeats)
            if rank == 0:
                tell(found, mib, place)
        dist.destroy_process_group(made)
        process_group.leave()


def tell(found: dict[str, float], mib: float, place: Place) -> None:
    """Prints what was measured of one size.

    Args:
        found: milliseconds of each way.
        mib: size of the vector.
        place: of the ranks.
    """
    ranks, speed = len(place.hosts), place.link_bytes_per_s
    floor_ms = 0 if speed is None else 1000 * mib * MIB / speed
    for name, taken_ms in found.items():
        of_link = f", {taken_ms / floor_ms:5.2f}x of the link" if floor_ms else ""
        print(
            f"{ranks:2d} ranks, {mib:6g} MiB, {name:24s} {taken_ms:9.1f} ms, "
            f"direct / this {found['direct'] / taken_ms:5.2f}{of_link}",
            flush=True,
        )
    if "chain" in found:
        way = way_of(place.hosts, int(mib * MIB))
        over = found[way] / min(found["direct"], found["chain"])
        print(f"{ranks:2d} ranks, {mib:6g} MiB: {way} is taken, {over:.2f}x the better", flush=True)


def run(options: argparse.Namespace, place: Place) -> None:
    """Starts the ranks of a place, and waits for them.

    Raises:
        SystemExit: one has failed.
    """
    try:
        on_ranks(measure, len(place.hosts), options, place, limit_s=LIMIT_S)
    except RankFailed as error:
        raise SystemExit(str(error)) from error


def on_hosts(options: argparse.Namespace) -> None:
    """The same on hosts of their own, with a limited link between any two."""
    hosts = tuple(
        Host(name=f"host{number}", devices=(Device(name="CPU", count=count),))
        for number, count in enumerate(options.hosts)
    )
    names = [host.name for host in hosts for _ in range(host.devices[0].count)]
    link = Link(bytes_per_s=options.link_bytes_per_s)
    with emulated_hosts(Inventory(hosts=hosts, link=link)) as layout:
        print(
            f"{'+'.join(map(str, options.hosts))} ranks on hosts as network namespaces, joined at "
            f"{link.bytes_per_s / 1e6:g} MB/s each way",
            flush=True,
        )
        run(options, Place(tuple(names), link.bytes_per_s, layout))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures on loopback, then over the link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=["loopback", "link"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8], help="on loopback")
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 3], help="ranks of each")
    parser.add_argument("--link-bytes-per-s", type=float, default=125e6)
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--chunk-kib", type=int, nargs="+", help="of chains; default: their rule")
    parser.add_argument("--room", type=int, nargs="+", help="chunks of it; default: their rule")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Of ranks, which torch would have warn that the launcher's address has no name.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.only != "link":
        print("loopback", flush=True)
        for ranks in options.ranks:
            run(options, Place(("loopback",) * ranks))
    if options.only != "loopback":
        try:
            on_hosts(options)
        except SparsePipeError as error:
            raise SystemExit(f"no hosts were made: {error}") from error


if __name__ == "__main__":
    main()
