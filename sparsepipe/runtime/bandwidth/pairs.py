"""Times of messages from rank to rank, over the transport that pipelines use."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, count
from typing import Any

import torch
import torch.distributed as dist

from sparsepipe.runtime.bandwidth.bench import Bench
from sparsepipe.runtime.transport import Kind, Message, Network
from sparsepipe.schedule import Plan

_TWO = Plan.of(config="1-1", cuts=[1], num_layers=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How long a message takes from one rank to another.

    Attributes:
        source: rank.
        target: rank.
        size_bytes: of the message's tensor.
        both_ways: ``target`` sends as much to ``source`` at the same time.
        seconds: median from handing it over to hearing that it has come, which takes an empty
            message back.
        latency_s: median of half the time that an empty message takes there and back.
        repeats: that count.
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
        """Each way."""
        return self.size_bytes / self.seconds


def pairs_of(hosts: Sequence[int], *, all_up_to: int) -> list[tuple[int, int]]:
    """Ranks to time between: all pairs where they are few, else one for each link.

    Args:
        hosts: of each rank, by any number.
        all_up_to: ranks; with more, one pair inside each host and one between any two.
    """
    if len(hosts) <= all_up_to:
        return list(combinations(range(len(hosts)), 2))
    of_host = [[rank for rank, host in enumerate(hosts) if host == h] for h in sorted({*hosts})]
    inside = [(ranks[0], ranks[1]) for ranks in of_host if len(ranks) > 1]
    between = combinations([ranks[0] for ranks in of_host], 2)
    return sorted([*inside, *((min(pair), max(pair)) for pair in between)])


def time_pairs(
    bench: Bench, pairs: Sequence[tuple[int, int]], sizes_bytes: Sequence[int]
) -> list[Sending]:
    """Times each pair by itself, there, back, and with the largest size both ways at once.

    A collective: every rank must call it.

    Args:
        bench: whose turn it is.
        pairs: of ranks, the lower one first.
        sizes_bytes: of the messages, ascending.

    Raises:
        TransportError: a rank is gone or does not answer.

    Returns:
        What this rank has timed as the first of a pair or as the one that sends.
    """
    found: list[Sending] = []
    for first, second in pairs:
        what = f"timing the link of ranks {first} and {second}"
        with bench.turn(what):
            ends = _Ends(bench, first, second)
        ways = [(first, second), (second, first)]
        turns = [(source, size, False) for source, _ in ways for size in [0, *sizes_bytes]]
        for source, size, both_ways in [*turns, (first, sizes_bytes[-1], True)]:
            with bench.turn(what):
                found += ends.time(source, size, both_ways=both_ways)
        with bench.turn(what):
            ends.close()
    return found


class _Ends:
    """Two ranks and the channels between them; the other ranks only stand by."""

    def __init__(self, bench: Bench, first: int, second: int) -> None:
        self._me = dist.get_rank()
        self._kinds = {first: Kind.ACTIVATION, second: Kind.GRADIENT}  # that each sends
        self._other = {first: second, second: first}.get(self._me)
        self._bench = bench
        self._sent, self._came = count(), count()
        self._latency_s = 0.0
        self._network = Network(
            _TWO,
            self._me,
            timeout_s=bench.effort.timeout_s,
            device=bench.device,
            direct=bench.direct,
            ranks=(first, second),
        )

    def time(self, source: int, size_bytes: int, *, both_ways: bool) -> list[Sending]:
        """The figure if this rank is ``source``; a measurement without bytes is the latency."""
        if self._other is None:
            return []
        leads = self._me == source
        load = self._load(size_bytes) if leads or both_ways else None
        if not leads:
            while not self._follow(load):
                pass
            return []
        times_s = self._bench.effort.times_s(lambda last: self._lead(load, last, both_ways))
        seconds = statistics.median(times_s)
        if not size_bytes:
            self._latency_s = seconds / 2
            return []
        return [
            Sending(
                source=source,
                target=self._other,
                size_bytes=size_bytes,
                both_ways=both_ways,
                seconds=seconds,
                latency_s=self._latency_s,
                repeats=len(times_s),
            )
        ]

    def close(self) -> None:
        self._network.close()

    def _load(self, size_bytes: int) -> torch.Tensor | None:
        if not size_bytes:
            return None
        # Written to, since pages that never were are all one page of zeros.
        load = torch.ones(size_bytes, dtype=torch.uint8, device=self._bench.device)
        self._bench.settle()
        return load

    def _lead(self, load: Any, last: bool, both_ways: bool) -> None:
        """One exchange: what is to be timed, and word that it has come."""
        self._send(load, last=last)
        self._receive()
        if both_ways:
            self._send(None)
            self._receive()

    def _follow(self, load: Any) -> bool:
        """The other side of an exchange; whether it was the last."""
        if load is not None:  # both ways at once
            self._send(load)
            last = self._receive()
            self._send(None)
            self._receive()
            return last
        last = self._receive()
        self._send(None)
        return last

    def _send(self, load: Any, *, last: bool = False) -> None:
        assert self._other is not None
        message = Message(minibatch=next(self._sent), meta={"last": last}, tree=load)
        # As a large message goes, whatever its size: tensors follow once the header has been read.
        self._network.send(self._kinds[self._me], self._other, message, held_back=True)

    def _receive(self) -> bool:
        assert self._other is not None
        number = next(self._came)
        message = self._network.receive(self._kinds[self._other], self._other, minibatch=number)
        last = bool(message.meta["last"])
        del message  # nothing refers to its buffers any more
        self._network.release(number)
        return last
