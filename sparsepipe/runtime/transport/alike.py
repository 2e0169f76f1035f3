"""Packets that are like the one before: their tensors are awaited before their header comes. Pure.

A receiver knows what follows a header when it has read it, so tensors wait at the sender until
then: for a thread to wake up over there and ask for them, which lasts as long as other threads keep
the cores busy. Where training is on plain tensors, most packets of a channel bring the same sizes,
for which the receiver can ask beforehand. Those of sparse tensors, whose sizes differ, and of
batches that are cut into unlike microbatches go as before. What was asked for cannot be taken back:
it takes up its memory until packets of these sizes come, and nothing else is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

Sizes = tuple[int, ...]
"""Bytes of each tensor that follows a header."""

RUNNING = 3
"""Packets of the same sizes running before such are asked for; fewer may be alike by chance."""
MOST_BYTES = 4 * 2**20
"""Of a packet that is asked for. What the other side waits for is written by whoever sends it, as
much at once as a socket takes, and that is the thread that computes; gloo's own writes the rest."""


@dataclass(frozen=True, slots=True)
class How:
    """How the tensors of a packet come; the receiver does as it is told.

    Attributes:
        awaited: they are what is asked for already.
        again: from the next packet on such are asked for beforehand.
    """

    awaited: bool
    again: bool


class Alike:
    """Decides at the sending end: sizes that came so often running are asked for from then on."""

    def __init__(self) -> None:
        self._last: Sizes = ()
        self._times = 0
        self._awaited: Sizes = ()

    def next(self, sizes: Sizes, *, repeats: bool) -> How:
        """How the next packet goes.

        Args:
            sizes: of it; empty where nothing follows the header.
            repeats: it is of those that may be alike.
        """
        if not repeats or not 0 < sum(sizes) <= MOST_BYTES:
            return How(awaited=False, again=False)
        if sizes == self._awaited:
            return How(awaited=True, again=True)
        self._times = self._times + 1 if sizes == self._last else 1
        self._last = sizes
        begins = not self._awaited and self._times == RUNNING
        if begins:
            self._awaited = sizes
        return How(awaited=False, again=begins)
