"""Packets that are like the one before: their tensors are awaited before their header comes. Pure.

A receiver knows what follows a header when it has read it, so tensors wait at the sender until
then: for a thread to wake up over there and ask for them, which lasts as long as other threads keep
the cores busy. In training on plain tensors all packets of a channel but the last ones of an epoch
bring the same sizes, for which the receiver can ask beforehand. What was asked for cannot be
taken back, so it stays asked for until a packet of these sizes comes, and nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass

Sizes = tuple[int, ...]
"""Bytes of each tensor that follows a header."""


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
    """Decides at the sending end: sizes that came twice running are asked for from then on."""

    def __init__(self) -> None:
        self._last: Sizes = ()
        self._awaited: Sizes = ()

    def next(self, sizes: Sizes, *, repeats: bool) -> How:
        """How the next packet goes.

        Args:
            sizes: of it; empty where nothing follows the header.
            repeats: it is of those that may be alike.
        """
        if not repeats or not sizes:
            return How(awaited=False, again=False)
        if sizes == self._awaited:
            return How(awaited=True, again=True)
        begins = not self._awaited and sizes == self._last
        self._last = sizes
        if begins:
            self._awaited = sizes
        return How(awaited=False, again=begins)
