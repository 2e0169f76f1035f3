"""Sums over ranks in a fixed order, whatever the number of elements and the network.

An ``all_reduce`` adds in a ring: which rank's addend comes first differs from element to element,
and float32 sums of three or more differ with it. Here elements are added in the order of the ranks,
in one of two ways (``sparsepipe.schedule.communication``): all ranks get one process's bits.
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
"""Partial sums that may be on their way to a rank, or lie there before it has added them. With one,
a link rests while its receiver adds a chunk and posts the next receive; more let a rank be late by
as many chunks. At 125 MB/s one to eight were all as good, 576 to 598 ms for 64 MiB
(benchmarks/ordered_sum.py --only link --room)."""
_LEAST_S = 0.001
"""The shortest limit of a wait; a limit of 0 would mean for ever."""
_SUM, _NEVER = 0, 1
"""Tags of messages: one of sums, and one with which nothing is ever sent."""
_CLOSED = "Application timeout caused pair closure"
"""Gloo's error on one lane where the other has reached its limit, or has broken off."""


class OrderedSum:
    """A vector that is summed over a group's ranks, in their order.

    Where it lies on a CUDA device, a group over gloo sums a copy in pinned host memory, in either
    way; one over NCCL sums on the devices, and directly, whatever ``way`` says.

    Args:
        device: where :attr:`values` lie; gloo is given host memory.
        way: how; None: as is best for the ranks' hosts and the length.
        chunk: elements that go through a chain together; None: as many as make a good size.
        room: partial sums that may lie at a rank of a chain; None: as many as are of use.
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
        """Replaces :attr:`values` by their sum; a collective."""
        if self._wire is not self._sent:
            self._wire.copy_(self._sent)
        if self._sum is None:  # chosen at the first sum, in which all ranks take part
            self._sum = self._add_directly
            # NCCL would need sends and receives in one call: those of one communicator that are
            # begun one by one go one after another, and ranks that begin them in unlike order wait
            # for ever.
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
        """Each rank adds one part of the vector and hands it to the others.

        That moves the same number of bytes as a ring, 2 (n - 1) / n of the vector a rank.
        """
        if self._parts is None:
            self._parts = torch.empty_like(self._wire)
        dist.all_to_all_single(self._parts, self._wire, group=self._group)
        first, *others = self._parts.chunk(self._ranks)
        for other in others:
            first += other
        # Not by an all_gather, over which gloo took longer for the same bytes (2 ranks, loopback).
        for other in others:
            other.copy_(first)
        dist.all_to_all_single(self._wire, self._parts, group=self._group)


def _host_number() -> int:
    """The same in all processes between which no link lies: of one machine and network."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        text = f"{machine} {os.stat('/proc/thread-self/ns/net').st_ino}"
    except OSError:  # not Linux
        text = socket.gethostname()
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One step of a lane.

    Attributes:
        act: ``expect``: from now on the chunk may come. ``take``: waits for it. ``send``: begins
            to send it, and waits for nothing.
    """

    act: Act
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The steps of a rank for the chunks that go one way.

    Attributes:
        source: place of the rank that they come from; None: they begin here.
        target: place of the rank that they go to; None: they end here.
        adds: what is taken is a partial sum, to which this rank's addend is added.
        steps: in this order.
    """

    source: int | None
    target: int | None
    adds: bool
    steps: tuple[LaneStep, ...]


def lanes(place: int, *, ranks: int, chunks: int, room: int) -> tuple[Lane, Lane]:
    """The lanes of a rank of a chain: up, and down. It follows both at once.

    Partial sums go up, from the first rank to the last, each of which adds its own addend; sums go
    down again. So two neighbours send each other the vector once, both ways at the same time, and
    no more crosses the link between two hosts whose ranks follow one another.

    Nobody waits for ever. Say that chunk c makes its q-th of 2 (``ranks`` - 1) hops at the time
    2 c + q. What must come before has an earlier time: the chunk's hop before; chunk c - 1 by the
    same hop, and by the next one, 2 (c - 1) + q + 1, since the receiver sends it on first; and
    chunk c - ``room`` by the same hop, which made room. So of all hops that are still to be made
    the earliest waits for nothing, also if sends lasted until the chunk has gone.

    Args:
        place: of the rank, from 0 at the bottom.
        ranks: of the chain, at least 2.
        chunks: of the vector.
        room: partial sums that may lie at a rank before it adds them; at least 1.
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
    # Sums take the place of this rank's addends, so all of them may come from the beginning on:
    # none does before its partial sum, with the addend in it, has gone up.
    downward = steps(chunks, takes=True, sends=below is not None) if above is not None else ()
    return up, Lane(source=above, target=below, adds=False, steps=tuple(downward))


class ChainSum:
    """Sums a vector in host memory over a gloo group of two or more, in the order of ranks."""

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
        # The first rank adds nothing to anything.
        lying = min(self._room, count) if place else 0
        self._partial = [torch.empty_like(self._chunks[0]) for _ in range(lying)]
        self._present = torch.zeros(ranks, dtype=torch.uint8)
        self._neighbours = [p for p in (place - 1, place + 1) if 0 <= p < ranks]
        self._failed: list[BaseException] = []

    def run(self) -> None:
        """Replaces the vector by its sum; a collective.

        It ends within the group's limit once all have come, for which that is the limit as well.
        """
        # All meet first, so that all miss a rank that does not come, and not its neighbours alone.
        dist.all_to_all_single(torch.empty_like(self._present), self._present, group=self._group)
        deadline_s = time.monotonic() + group_limit_s(self._group)
        self._failed.clear()
        # A thread for each way, since gloo cannot wait for whichever chunk comes first.
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
        """Does the steps of a lane; notes an error, and lets the other lane end.

        No rank waits for what it sends before it has taken all that is to come, and gloo needs no
        thread of ours to send: a transfer begins whenever the other side expects the chunk.
        """
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
            for work in sent:
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
