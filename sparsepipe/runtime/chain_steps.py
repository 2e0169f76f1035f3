"""What a rank of a chain does, chunk after chunk, to sum a vector over all of them: pure.

Partial sums go *up*, from the first rank to the last, each of which adds its own addend; sums go
*down* again from the last one. A rank follows both lanes at once, so that neither waits for the
other's chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Act = Literal["expect", "take", "send"]


@dataclass(frozen=True, slots=True)
class Step:
    """One of a lane's.

    Attributes:
        act: ``expect``: from now on the chunk may come. ``take``: waits for it. ``send``: begins
            to send it, and waits for nothing.
        chunk: its number.
    """

    act: Act
    chunk: int

    def __str__(self) -> str:
        return f"{self.act[0]}{self.chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What a rank does for the chunks that go one way, in order.

    Attributes:
        source: place of the rank that they come from; None: they begin here.
        target: place of the rank that they go to; None: they end here.
        adds: what is taken is a partial sum, to which this rank's addend comes.
        steps: in this order.
    """

    source: int | None
    target: int | None
    adds: bool
    steps: tuple[Step, ...]


def lanes(place: int, *, ranks: int, chunks: int, room: int) -> tuple[Lane, Lane]:
    """The lanes of a rank: up, and down.

    Nobody waits for ever. A chunk makes 2 (``ranks`` - 1) hops: up to the last rank, and down to
    the first. Say that chunk c makes its q-th hop at the time 2 c + q. Then whatever must come
    before that has an earlier time:

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


def _steps(chunks: int, *, room: int, takes: bool, sends: bool) -> Iterator[Step]:
    if takes:
        yield from (Step("expect", chunk) for chunk in range(min(room, chunks)))
    for chunk in range(chunks):
        if takes:
            yield Step("take", chunk)
            if chunk + room < chunks:
                yield Step("expect", chunk + room)
        if sends:
            yield Step("send", chunk)
