"""A sum over the ranks of a gloo group that goes through them as through a chain.

Partial sums go *up*, from the first rank to the last, each of which adds its own addend; sums go
*down* again from the last one. Each two neighbours send each other the vector once, both ways at
the same time. Ranks of one host are neighbours where they follow one another, so that no more
crosses the link between two hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.failures.missing_ranks import group_limit_s
from sparsepipe.schedule.communication import CHUNK_BYTES

Act = Literal["expect", "take", "send"]

_ROOM = 4
"""Partial sums that may be on their way to a rank, or lie there before it has added them. With one,
a link rests while its receiver adds a chunk and posts the next receive. With two it rests only
where that takes longer than a chunk on the link (8 ms for 1 MiB at 125 MB/s, 0.8 ms at ten times
that). Two more let a rank be late by as many chunks, as one that waits for a core is, before the
link to it rests. At 125 MB/s on quiet cores one to eight were all as good, 576 to 598 ms for 64 MiB
(benchmarks/ordered_sum.py --only link --room)."""
_LEAST_S = 0.001
"""A limit of a wait; none would mean for ever."""
_SUM, _NEVER = 0, 1
"""Tags of messages: one of sums, and one with which nothing is ever sent."""
_CLOSED = "Application timeout caused pair closure"
"""Gloo's error on one lane where the other has reached its limit, or has broken off."""


@dataclass(frozen=True, slots=True)
class LaneStep:
    """One of a lane's.

    Attributes:
        act: ``expect``: from now on the chunk may come. ``take``: waits for it. ``send``: begins
            to send it, and waits for nothing.
    """

    act: Act
    chunk: int

    def __str__(self) -> str:
        return f"{self.act[0]}{self.chunk}"


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
    """The lanes of a rank: up, and down. It follows both at once.

    Nobody waits for ever. A chunk makes 2 (``ranks`` - 1) hops: up to the last rank, and down to
    the first. Say that chunk c makes its q-th hop at the time 2 c + q. Then what must come before
    that has an earlier time:

    - the chunk's hop before, which brought it to the sender, 2 c + q - 1;
    - what the sender has sent before by this hop, chunk c - 1, 2 (c - 1) + q;
    - what the receiver has done in this lane before it takes chunk c: it has sent chunk c - 1 on,
      by hop q + 1, 2 (c - 1) + q + 1;
    - what made room at the receiver, so that chunk c is expected: it has taken chunk c - ``room``,
      2 (c - ``room``) + q.

    So of all hops that are still to be made the earliest waits for nothing. That holds even if
    sends lasted until the chunk has gone, and for any ``room`` from 1 on.

    Args:
        place: of the rank, from 0 at the bottom.
        ranks: of the chain, at least 2.
        chunks: of the vector.
        room: partial sums that may lie at a rank before it adds them; at least 1.
    """
    below = place - 1 if place else None
    above = place + 1 if place + 1 < ranks else None
    up = Lane(
        source=below,
        target=below if above is None else above,
        adds=True,
        steps=tuple(_steps(chunks, room=room, takes=below is not None, sends=True)),
    )
    # Sums take the place of this rank's addends, so all of them may come from the beginning on:
    # none does before its partial sum, with the addend in it, has gone up.
    down = Lane(
        source=above,
        target=below,
        adds=False,
        steps=tuple(_steps(chunks, room=chunks, takes=True, sends=below is not None))
        if above is not None
        else (),
    )
    return up, down


def _steps(chunks: int, *, room: int, takes: bool, sends: bool) -> Iterator[LaneStep]:
    if takes:
        yield from (LaneStep("expect", chunk) for chunk in range(min(room, chunks)))
    for chunk in range(chunks):
        if takes:
            yield LaneStep("take", chunk)
            if chunk + room < chunks:
                yield LaneStep("expect", chunk + room)
        if sends:
            yield LaneStep("send", chunk)


class ChainSum:
    """Sums a vector over a group's ranks, in their order.

    Args:
        group: over gloo, of two ranks or more, all of which call :meth:`run`.
        vector: in host memory; gloo would take none of a device.
        chunk: elements that go together; None: as many as make a good size.
        room: partial sums that may lie at a rank, from 1 on; None: as many as are of use.

    Raises:
        ValueError: the vector is on a device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        vector: Tensor,
        *,
        chunk: int | None = None,
        room: int | None = None,
    ) -> None:
        if vector.device.type != "cpu":
            raise ValueError(
                f"a chain sums vectors in host memory, and this one is on {vector.device}; sum a "
                "copy there, as OrderedSum does over gloo, or sum directly"
            )
        self._group = group
        self._chunks = torch.split(vector, chunk or CHUNK_BYTES // vector.element_size())
        self._place, ranks = dist.get_rank(group), dist.get_world_size(group)
        count = len(self._chunks)
        self._room = room or _ROOM
        self._up, self._down = lanes(self._place, ranks=ranks, chunks=count, room=self._room)
        # The first rank adds nothing to anything.
        lying = min(self._room, count) if self._place else 0
        self._partial = [torch.empty_like(self._chunks[0]) for _ in range(lying)]
        self._present = torch.zeros(ranks, dtype=torch.uint8)
        self._neighbours = [p for p in (self._place - 1, self._place + 1) if 0 <= p < ranks]
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
        try:
            self._move(lane, deadline_s)
        except BaseException as error:
            self._failed.append(error)
            self._break_off()

    def _move(self, lane: Lane, deadline_s: float) -> None:
        """Does the steps of a lane.

        No rank waits for what it sends before it has taken all that is to come, and gloo needs no
        thread of ours to send: a transfer begins whenever the other side expects the chunk.
        """
        coming: dict[int, dist.Work] = {}
        sent: list[dist.Work] = []
        for step in lane.steps:
            chunk = self._chunks[step.chunk]
            if step.act == "send":
                work = dist.isend(chunk, group=self._group, group_dst=lane.target, tag=_SUM)
                sent.append(_in_group(work))
            elif step.act == "expect":
                into = self._into(lane, step.chunk)
                work = dist.irecv(into, group=self._group, group_src=lane.source, tag=_SUM)
                coming[step.chunk] = _in_group(work)
            else:
                _finish(coming.pop(step.chunk), deadline_s)
                if lane.adds:
                    torch.add(self._into(lane, step.chunk), chunk, out=chunk)
        for work in sent:
            _finish(work, deadline_s)

    def _into(self, lane: Lane, number: int) -> Tensor:
        """Where a chunk is received: a sum takes its place in the vector."""
        chunk = self._chunks[number]
        return self._partial[number % self._room][: chunk.numel()] if lane.adds else chunk

    def _break_off(self) -> None:
        for place in self._neighbours:
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8)
                work = dist.irecv(nothing, group=self._group, group_src=place, tag=_NEVER)
                if work is not None:
                    work.wait(timedelta(seconds=_LEAST_S))


def _in_group(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def _finish(work: dist.Work, deadline_s: float) -> None:
    work.wait(timedelta(seconds=max(_LEAST_S, deadline_s - time.monotonic())))
