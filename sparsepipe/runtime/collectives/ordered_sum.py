"""Sums over ranks in a fixed order, whatever the number of elements and the network.

An ``all_reduce`` adds in a ring: which rank's addend comes first differs from element to element,
and with it float32 sums of three or more addends. Here all elements are added in the order of the
ranks, as in a single process, in one of two ways (``sparsepipe.schedule.communication``).
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.failures.missing_ranks import group_limit_s
from sparsepipe.schedule.communication import CHUNK_BYTES, Way, way_of

Act = Literal["expect", "take", "send"]

_ROOM = 4
"""Chunks of partial sums that may be on their way to a rank or wait there to be added. With one, a
link rests while its receiver adds a chunk and posts the next receive; more let a rank be late by as
many chunks. At 125 MB/s one to eight were equally good, 576 to 598 ms for 64 MiB
(benchmarks/ordered_sum.py --only link --room)."""
_LEAST_S = 0.001
"""Shortest time limit of a wait, in seconds; gloo takes 0 as no limit."""
_SUM, _NEVER = 0, 1
"""Tags of messages: one for sums, and one with which nothing is ever sent."""
_CLOSED = "Application timeout caused pair closure"
"""Part of gloo's error on one lane after the other lane reached its time limit or broke off."""


class OrderedSum:
    """A vector :attr:`values` [length] that is summed over a group's ranks, in their order.

    If it lies on a CUDA device, a gloo group sums a copy in pinned host memory, in either way; an
    NCCL group sums on the devices, always directly.

    Args:
        length: number of elements.
        way: how to sum over gloo; None: the better way for the ranks' hosts and the length.
        chunk: number of elements that go through a chain together; None: 1 MiB of them.
        room: number of chunks of partial sums that may wait at a rank of a chain; None: 4.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        way: Way | None = None,
        chunk: int | None = None,
        room: int | None = None,
    ) -> None:
        self._group = group
        self._way = way
        self._chunk, self._room = chunk, room
        self._over_gloo = dist.get_backend(group) == "gloo"
        staged = device.type == "cuda" and self._over_gloo
        self._ranks = dist.get_world_size(group)
        whole = -(-length // self._ranks) * self._ranks
        self._sent = sent = torch.zeros(whole, dtype=dtype, device=device)
        self._wire = torch.empty_like(sent, device="cpu", pin_memory=True) if staged else sent
        self._sum: Callable[[], None] | None = None
        self._parts: Tensor | None = None
        self.values = sent[:length]

    def reduce(self) -> None:
        """Replaces :attr:`values` with their sum over the ranks; a collective."""
        if self._wire is not self._sent:
            self._wire.copy_(self._sent)
        if self._sum is None:  # chosen at the first sum, in which all ranks take part
            self._sum = self._add_directly
            # NCCL would need sends and receives in one call: with one communicator, those that
            # begin one by one run one after another, and ranks that begin them in different orders
            # wait for ever.
            if self._ranks > 1 and self._over_gloo:
                vector = self._wire[: len(self.values)]
                mine = torch.tensor([_host_number()], dtype=torch.int64)
                hosts = [torch.empty_like(mine) for _ in range(self._ranks)]
                if self._way is None:
                    dist.all_gather(hosts, mine, group=self._group)
                if (self._way or way_of(list(map(int, hosts)), vector.nbytes)) == "chain":
                    chain = ChainSum(self._group, vector, chunk=self._chunk, room=self._room)
                    self._sum = chain.run
        self._sum()
        if self._wire is not self._sent:
            self._sent.copy_(self._wire)

    def _add_directly(self) -> None:
        """Each rank adds up one part and sends it to the others: as many bytes as in a ring."""
        if self._parts is None:
            self._parts = torch.empty_like(self._wire)
        dist.all_to_all_single(self._parts, self._wire, group=self._group)
        first, *others = self._parts.chunk(self._ranks)
        for other in others:
            first += other
        # Not with all_gather, in which gloo took longer for the same bytes (2 ranks, loopback).
        for other in others:
            other.copy_(first)
        dist.all_to_all_single(self._wire, self._parts, group=self._group)


def _host_number() -> int:
    """A number that processes share if they are on the same machine and network namespace."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = f"{machine} {os.stat('/proc/thread-self/ns/net').st_ino}"
    except OSError:  # not Linux
        text = socket.gethostname()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One step of a :class:`Lane`.

    Attributes:
        act: ``expect`` begins to receive the chunk, ``take`` waits for it, ``send`` begins to send
            it; only ``take`` waits.
        chunk: index of the chunk in the vector.
    """

    act: Act
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The steps of a rank for the chunks that go up, or down, the chain.

    Attributes:
        source: rank, in the group, that sends the chunks here; None: they begin here.
        target: rank, in the group, to which they go next; None: they end here.
        adds: whether the chunks are partial sums, to which this rank adds its addend.
        steps: the steps, in their order.
    """

    source: int | None
    target: int | None
    adds: bool
    steps: tuple[LaneStep, ...]


def lanes(place: int, *, ranks: int, chunks: int, room: int) -> tuple[Lane, Lane]:
    """The lanes of a rank of a chain, up and down, which it follows at the same time.

    Partial sums go up from the first rank to the last, and each rank adds its addend; the sums come
    down again. So two neighbours send each other the vector once, in both directions at once, and
    no more crosses the link between two hosts if the ranks of each are neighbours.

    No rank waits for ever. Say that chunk c makes its q-th of 2 (``ranks`` - 1) hops at the time
    2 c + q. What must come before has an earlier time: the chunk's previous hop; the same hop of
    chunk c - 1, and its next one, at 2 (c - 1) + q + 1, since the receiver sends it on first; and
    the same hop of chunk c - ``room``, which made room. So the earliest of all hops still to be
    made waits for nothing, even if sends lasted until the chunk has gone.

    Args:
        place: the rank in the group, which is its position in the chain, from 0 at the bottom.
        ranks: number of ranks in the chain; at least 2.
        chunks: number of chunks of the vector.
        room: number of chunks of partial sums that may wait at a rank; at least 1.
    """

    def steps(room: int, *, takes: bool, sends: bool) -> Iterator[LaneStep]:
        if takes:
            yield from (LaneStep("expect", chunk) for chunk in range(min(room, chunks)))
        for chunk in range(chunks):
            if takes:
                yield LaneStep("take", chunk)
                if chunk + room < chunks:
                    yield LaneStep("expect", chunk + room)
            if sends:
                yield LaneStep("send", chunk)

    below = place - 1 if place else None
    above = place + 1 if place + 1 < ranks else None
    upward = tuple(steps(room, takes=below is not None, sends=True))
    up = Lane(source=below, target=below if above is None else above, adds=True, steps=upward)
    # Sums replace this rank's addends, so all of them may be expected from the beginning: none
    # comes before its partial sum, with the addend in it, has gone up.
    downward = steps(chunks, takes=True, sends=below is not None) if above is not None else ()
    return up, Lane(source=above, target=below, adds=False, steps=tuple(downward))


class ChainSum:
    """Sums a vector in host memory over the ranks of a gloo group, at least two, in their order."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        vector: Tensor,
        *,
        chunk: int | None = None,
        room: int | None = None,
    ) -> None:
        assert vector.device.type == "cpu", "gloo sends from host memory"
        self._group = group
        self._chunks = torch.split(vector, chunk or CHUNK_BYTES // vector.element_size())
        place, ranks = dist.get_rank(group), dist.get_world_size(group)
        count = len(self._chunks)
        self._room = room or _ROOM
        self._up, self._down = lanes(place, ranks=ranks, chunks=count, room=self._room)
        # The first rank receives no partial sums.
        lying = min(self._room, count) if place else 0
        self._partial = [torch.empty_like(self._chunks[0]) for _ in range(lying)]
        self._present = torch.zeros(ranks, dtype=torch.uint8)
        self._neighbours = [p for p in (place - 1, place + 1) if 0 <= p < ranks]
        self._failed: list[BaseException] = []

    def run(self) -> None:
        """Replaces the vector with its sum; a collective, within the group's time limit."""
        # All meet first, so that all notice a rank that does not come, not only its neighbours.
        dist.all_to_all_single(torch.empty_like(self._present), self._present, group=self._group)
        deadline_s = time.monotonic() + group_limit_s(self._group)
        self._failed.clear()
        # A thread for each lane, since gloo cannot wait for whichever chunk comes first.
        other = threading.Thread(
            target=self._follow, args=(self._down, deadline_s), name="chain", daemon=True
        )
        if self._down.steps:
            other.start()
        self._follow(self._up, deadline_s)
        if self._down.steps:
            try:
                other.join()
            except BaseException:  # such as a signal handler's: the vector is not left to a thread
                self._break_off()
                other.join()
                raise
        if self._failed:
            raise next((e for e in self._failed if _CLOSED not in str(e)), self._failed[0])

    def _follow(self, lane: Lane, deadline_s: float) -> None:
        """Performs the steps of a lane; notes an error, which also ends the other lane."""
        coming: dict[int, tuple[dist.Work | None, Tensor]] = {}
        sent: list[dist.Work | None] = []

        def finish(work: dist.Work | None) -> None:
            assert work is not None, "this rank is not in the group"
            work.wait(timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic())))

        try:
            for step in lane.steps:
                number, chunk = step.chunk, self._chunks[step.chunk]
                if step.act == "send":
                    work = dist.isend(chunk, group=self._group, group_dst=lane.target, tag=_SUM)
                    sent.append(work)
                elif step.act == "expect":  # a sum takes its place in the vector
                    into = self._partial[number % self._room][: len(chunk)] if lane.adds else chunk
                    work = dist.irecv(into, group=self._group, group_src=lane.source, tag=_SUM)
                    coming[number] = work, into
                else:
                    work, into = coming.pop(number)
                    finish(work)
                    if lane.adds:
                        torch.add(into, chunk, out=chunk)
            for work in sent:  # last; gloo begins each send once the other side expects the chunk
                finish(work)
        except BaseException as error:
            self._failed.append(error)
            self._break_off()

    def _break_off(self) -> None:
        for place in self._neighbours:
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                work = dist.irecv(nothing, group=self._group, group_src=place, tag=_NEVER)
                if work is not None:
                    work.wait(timedelta(seconds=_LEAST_S))
