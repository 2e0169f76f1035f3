"""Measures communication between ranks: messages over the pipeline's transport, and sums."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, count
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from sparsepipe.errors import TransportError
from sparsepipe.runtime.collectives.ordered_sum import OrderedSum
from sparsepipe.runtime.failures.missing_ranks import AGAIN, collective, new_group
from sparsepipe.runtime.transport import Kind, Message, Network
from sparsepipe.schedule import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingBudget:
    """How often something is timed, and how long that may take.

    Attributes:
        repeats: largest number of measurements that count; at least one does.
        warmups: number of measurements before those; fewer once ``most_s`` has passed.
        most_s: seconds for all measurements; the first that begins later counts and is the last.
        timeout_s: limit in seconds of every wait for another rank.
    """

    repeats: int
    warmups: int
    most_s: float
    timeout_s: float

    def times_s(self, exchange: Callable[[bool], None]) -> list[float]:
        """Calls ``exchange(is_last)`` repeatedly; returns the seconds of each call that counts."""
        begun_s, warm, counted = time.perf_counter(), 0, list[float]()
        while True:
            start_s = time.perf_counter()
            over = start_s - begun_s > self.most_s
            counts = over or warm >= self.warmups
            last = counts and (over or len(counted) + 1 >= self.repeats)
            exchange(last)
            if counts:
                counted.append(time.perf_counter() - start_s)
            else:
                warm += 1
            if last:
                return counted

    def within(self, once_s: float) -> tuple[int, int]:
        """(warm-ups, repeats) that fit in ``most_s`` at ``once_s`` each; at least one repeat."""
        room = max(1, int(self.most_s / max(once_s, 1e-9)))
        warmups = min(self.warmups, room - 1)
        return warmups, min(self.repeats, room - warmups)


class Benchmark:
    """Runs measurements one after another. All ranks create their Benchmark at the same time.

    Tensors are sent from ``device``, by default the host; with ``direct``, between CUDA devices
    over NCCL.
    """

    def __init__(
        self, budget: TimingBudget, *, device: torch.device | None = None, direct: bool = False
    ) -> None:
        self.budget = budget
        self.device = device or torch.device("cpu")
        self.direct = direct
        everyone = list(range(dist.get_world_size()))
        self._everyone = new_group(everyone, backend="gloo", timeout_s=budget.timeout_s)

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """Context of the measurement ``what``, made by some of the ranks; all wait for its end."""
        try:
            yield
            with collective(f"waiting for the end of {what}", self._everyone):
                dist.barrier(self._everyone)
        except TransportError as error:
            error.message += f" (while {what})"
            error.remedy = error.remedy.replace(AGAIN, "run the command again")
            raise

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Closes the connections through which all ranks wait in :meth:`turn`; a collective."""
        dist.destroy_process_group(self._everyone)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTime:
    """How long a message takes from one rank to another.

    Attributes:
        both_ways: whether ``target`` sends as much to ``source`` at the same time.
        seconds: median time from the send to the arrival of the answer, an empty message.
        latency_s: half the median time that an empty message takes there and back.
        repeats: number of measurements of which ``seconds`` is the median.
    """

    source: int
    target: int
    size_bytes: int
    both_ways: bool
    seconds: float
    latency_s: float
    repeats: int

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second from ``source`` to ``target``; if ``both_ways``, as many return."""
        return self.size_bytes / self.seconds


def pairs_of(hosts: Sequence[int], *, all_up_to: int) -> list[tuple[int, int]]:
    """Pairs of ranks to measure, given each rank's host number.

    All pairs of up to ``all_up_to`` ranks; else one inside each host, one between every two hosts.
    """
    if len(hosts) <= all_up_to:
        return list(combinations(range(len(hosts)), 2))
    of_host = [[rank for rank, host in enumerate(hosts) if host == h] for h in sorted({*hosts})]
    inside = [(ranks[0], ranks[1]) for ranks in of_host if len(ranks) > 1]
    between = combinations([ranks[0] for ranks in of_host], 2)
    return sorted([*inside, *((min(pair), max(pair)) for pair in between)])


def time_pairs(
    benchmark: Benchmark, pairs: Sequence[tuple[int, int]], sizes_bytes: Sequence[int]
) -> list[MessageTime]:
    """Measures messages between each of ``pairs``; returns the times of those that this rank sends.

    A collective of all ranks. Pairs take turns: each is timed from its first rank to the second,
    back, and, with the last size, the largest, in both directions at once.
    """
    found: list[MessageTime] = []
    for first, second in pairs:
        what = f"timing the link of ranks {first} and {second}"
        with benchmark.turn(what):
            pair = _Pair(benchmark, first, second)
        ways = [(first, second), (second, first)]
        turns = [(source, size, False) for source, _ in ways for size in [0, *sizes_bytes]]
        for source, size, both_ways in [*turns, (first, sizes_bytes[-1], True)]:
            with benchmark.turn(what):
                found += pair.time(source, size, both_ways=both_ways)
        with benchmark.turn(what):
            pair.network.close()
    return found


class _Pair:
    """Two ranks and the channels between them; the other ranks take no part in measurements."""

    def __init__(self, benchmark: Benchmark, first: int, second: int) -> None:
        self._me = dist.get_rank()
        self._kinds = {first: Kind.ACTIVATION, second: Kind.GRADIENT}  # that each sends
        self._other = {first: second, second: first}.get(self._me, -1)
        self._benchmark = benchmark
        self._sent, self._came = count(), count()
        self._latency_s = 0.0
        self.network = Network(
            Plan.of(config="1-1", cuts=[1], num_layers=2),
            self._me,
            timeout_s=benchmark.budget.timeout_s,
            device=benchmark.device,
            direct=benchmark.direct,
            ranks=(first, second),
        )

    def time(self, source: int, size_bytes: int, *, both_ways: bool) -> list[MessageTime]:
        """Times a message; returns [time] on ``source``, else []. 0 bytes only set the latency."""
        if self._other < 0:
            return []
        leads = self._me == source
        load = None
        if size_bytes and (leads or both_ways):
            # Ones, since pages that were never written to all share one page of zeros.
            load = torch.ones(size_bytes, dtype=torch.uint8, device=self._benchmark.device)
            self._benchmark.synchronize()
        if not leads:
            last = False
            while not last:
                if load is not None:  # both ways at once
                    self._send(load)
                last = self._receive()
                self._send(None)
                if load is not None:
                    self._receive()
            return []

        def exchange(last: bool) -> None:
            self._send(load, last=last)
            self._receive()
            if both_ways:
                self._send(None)
                self._receive()

        times_s = self._benchmark.budget.times_s(exchange)
        seconds = statistics.median(times_s)
        if not size_bytes:
            self._latency_s = seconds / 2
            return []
        return [
            MessageTime(
                source=source,
                target=self._other,
                size_bytes=size_bytes,
                both_ways=both_ways,
                seconds=seconds,
                latency_s=self._latency_s,
                repeats=len(times_s),
            )
        ]

    def _send(self, load: Any, *, last: bool = False) -> None:
        message = Message(minibatch=next(self._sent), meta={"last": last}, tree=load)
        # Sent like a large message, whatever its size: tensors follow once the header is read.
        self.network.send(self._kinds[self._me], self._other, message, held_back=True)

    def _receive(self) -> bool:
        number = next(self._came)
        message = self.network.receive(self._kinds[self._other], self._other, minibatch=number)
        last = bool(message.meta["last"])
        del message  # nothing refers to its buffers any more
        self.network.release(number)
        return last


How = Literal["all_reduce", "replicas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionTime:
    """How long ``ranks`` take to sum a float32 vector of ``size_bytes`` over all of them.

    Attributes:
        how: ``all_reduce`` is torch's, as in data parallelism; ``replicas`` is the ordered sum with
            which the replicas of a stage average gradients.
        seconds: median time of ``repeats`` sums, measured on the first of ``ranks``.
    """

    ranks: tuple[int, ...]
    how: How
    size_bytes: int
    seconds: float
    repeats: int


def groups_of(hosts: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups to measure, given each rank's host number: all ranks; each host's, if several."""
    everyone = tuple(range(len(hosts)))
    inside = [tuple(r for r in everyone if hosts[r] == host) for host in sorted({*hosts})]
    return list(dict.fromkeys([everyone, *(ranks for ranks in inside if len(ranks) > 1)]))


def time_reductions(
    benchmark: Benchmark, groups: Sequence[tuple[int, ...]], sizes_bytes: Sequence[int]
) -> list[ReductionTime]:
    """Measures float32 sums in each of ``groups``, one after another; a collective of all ranks.

    Returns the times of the groups whose first rank this is. Sizes are rounded down to a multiple
    of 4 bytes, at least 4.
    """
    found: list[ReductionTime] = []
    for ranks in groups:
        mine = dist.get_rank() in ranks
        what = f"timing sums over ranks {', '.join(map(str, ranks))}"
        with benchmark.turn(what):
            timeout_s = benchmark.budget.timeout_s
            made = new_group(list(ranks), backend=dist.get_backend(), timeout_s=timeout_s)
        for how in get_args(How):
            for size_bytes in sizes_bytes:
                length = max(1, size_bytes // 4)
                with benchmark.turn(what):
                    times_s = _reduction_times_s(benchmark, made, how, length) if mine else []
                if dist.get_rank() == ranks[0]:
                    seconds = statistics.median(times_s)
                    found.append(
                        ReductionTime(
                            ranks=ranks,
                            how=how,
                            size_bytes=4 * length,
                            seconds=seconds,
                            repeats=len(times_s),
                        )
                    )
        if mine:
            dist.destroy_process_group(made)
    return found


def _reduction_times_s(benchmark: Benchmark, made: Any, how: How, length: int) -> list[float]:
    device = benchmark.device
    total = OrderedSum(made, length=length, dtype=torch.float32, device=device)
    vector = torch.zeros(length, device=device)

    def exchange_s() -> float:
        start_s = time.perf_counter()
        if how == "replicas":
            total.reduce()
        else:
            dist.all_reduce(vector, group=made)
        benchmark.synchronize()
        return time.perf_counter() - start_s

    def slowest_s(own_s: float) -> float:
        """The longest ``own_s`` in the group, so that all its ranks repeat equally often."""
        place = "cpu" if dist.get_backend(made) == "gloo" else device
        found_s = torch.tensor([own_s], dtype=torch.float64, device=place)
        dist.all_reduce(found_s, op=dist.ReduceOp.MAX, group=made)
        return float(found_s)

    with collective(f"a sum over {length} numbers", made):
        times_s = [exchange_s()]  # sets up connections; counts only if no time is left for more
        if slowest_s(times_s[0]) <= benchmark.budget.most_s:
            warmups, repeats = benchmark.budget.within(slowest_s(exchange_s()))
            times_s = [exchange_s() for _ in range(warmups + repeats)][warmups:]
    return times_s
