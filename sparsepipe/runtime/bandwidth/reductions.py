"""Times of the sums over ranks that training takes: data parallelism's, and a stage's replicas'."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from sparsepipe.runtime.bandwidth.bench import Bench
from sparsepipe.runtime.meeting import meeting, new_group
from sparsepipe.runtime.ordered_sum import OrderedSum

How = Literal["all_reduce", "replicas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How long ranks take for a sum over all of them.

    Attributes:
        ranks: that take part.
        how: ``all_reduce`` is torch's, as data parallelism uses it; ``replicas`` the ordered
            sum by which the replicas of a stage average gradients, in the way for their hosts.
        size_bytes: of the vector.
        seconds: median.
        repeats: that count.
    """

    ranks: tuple[int, ...]
    how: How
    size_bytes: int
    seconds: float
    repeats: int


def groups_of(hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """All ranks, and those of each host that has several, where there are several hosts.

    Args:
        hosts: of each rank, by any number.
    """
    everyone = tuple(range(len(hosts)))
    inside = [tuple(r for r in everyone if hosts[r] == host) for host in sorted({*hosts})]
    return list(dict.fromkeys([everyone, *(ranks for ranks in inside if len(ranks) > 1)]))


def time_reductions(
    bench: Bench, groups: Sequence[tuple[int, ...]], sizes_bytes: Sequence[int]
) -> list[Reduction]:
    """Times sums of float32 over each group by itself; a collective of all ranks.

    Args:
        bench: whose turn it is.
        groups: ranks that sum.
        sizes_bytes: of the vectors; what is no multiple of 4 is rounded down.

    Raises:
        TransportError: a rank is gone or did not come.

    Returns:
        What this rank has timed as the first of a group.
    """
    found: list[Reduction] = []
    backend = dist.get_backend()
    for ranks in groups:
        what = f"timing sums over ranks {', '.join(map(str, ranks))}"
        with bench.turn(what):
            made = new_group(list(ranks), backend=backend, timeout_s=bench.effort.timeout_s)
        hows: tuple[How, ...] = ("all_reduce", "replicas")
        for how in hows:
            for size_bytes in sizes_bytes:
                with bench.turn(what):
                    if dist.get_rank() in ranks:
                        found += _timed(bench, made, ranks, how, size_bytes)
        if dist.get_rank() in ranks:
            dist.destroy_process_group(made)
    return found


def _timed(
    bench: Bench, made: Any, ranks: tuple[int, ...], how: How, size_bytes: int
) -> list[Reduction]:
    length = max(1, size_bytes // 4)
    reduce = _sum_of(bench, made, how, length)

    def exchange_s() -> float:
        start_s = time.perf_counter()
        reduce()
        bench.settle()
        return time.perf_counter() - start_s

    def slowest_s(own_s: float) -> float:
        """Of all ranks, which must do it equally often."""
        found_s = torch.tensor([own_s], dtype=torch.float64, device=_place(bench, made))
        dist.all_reduce(found_s, op=dist.ReduceOp.MAX, group=made)
        return float(found_s)

    with meeting(f"a sum over {length} numbers", made):
        times_s = [exchange_s()]  # connects, which counts only where there is no time for others
        if slowest_s(times_s[0]) <= bench.effort.most_s:
            warmups, repeats = bench.effort.within(slowest_s(exchange_s()))
            times_s = [exchange_s() for _ in range(warmups + repeats)][warmups:]
    if dist.get_rank() != ranks[0]:
        return []
    return [
        Reduction(
            ranks=ranks,
            how=how,
            size_bytes=4 * length,
            seconds=statistics.median(times_s),
            repeats=len(times_s),
        )
    ]


def _sum_of(bench: Bench, made: Any, how: How, length: int) -> Callable[[], None]:
    if how == "replicas":
        total = OrderedSum(made, length=length, dtype=torch.float32, device=bench.device)
        return total.reduce
    vector = torch.zeros(length, device=bench.device)
    return lambda: dist.all_reduce(vector, group=made)


def _place(bench: Bench, made: Any) -> torch.device:
    """Where a group's own words lie."""
    return torch.device("cpu") if dist.get_backend(made) == "gloo" else bench.device
