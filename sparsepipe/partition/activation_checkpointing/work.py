"""How much a search may look at: counted and not timed, so that it ends alike on any machine."""

from __future__ import annotations

MOST_LOOKS = 8_000_000
"""Looks of a search where the memory chooses layers, each being at a place or at a choice of
layers, or at some pairs of places where stages begin and end; ``benchmarks/search_work.py`` times
them."""

_PAIRS = 1000
"""At which a look goes together; a few looks more have to be begun."""

_BEGUN = 10

_SPANS = 10
"""Of layers, which take as long to write down as a look."""

_BOUNDS = 1 / 4
"""Of all work, which bounds may take: the rest is for what they are bounds of."""


class Work:
    """What a search has done, and what it may.

    Args:
        most: looks.

    Attributes:
        done: looks so far.
    """

    def __init__(self, most: float = float("inf")) -> None:
        self._most, self._allowed, self.done = most, most, 0.0
        self._of_bounds = 0.0

    @property
    def is_done(self) -> bool:
        """Whether no more may be done for now."""
        return self.done >= self._allowed

    @property
    def is_all_done(self) -> bool:
        """Whether no more may be done at all."""
        return self.done >= self._most

    @property
    def may_bound(self) -> bool:
        """Whether there is work left for bounds, which is a part of all."""
        return self._of_bounds < _BOUNDS * self._most

    def allow(self, *, turns: int) -> None:
        """Allows what comes next its part of what is left.

        Args:
            turns: how many are to come, with this one, each of which may do as much.
        """
        self._allowed = self.done + (self._most - self.done) / turns

    def look(self, looks: int) -> None:
        """So much was looked at."""
        self.done += looks

    def look_at_spans(self, spans: int) -> None:
        """So many spans of layers were written down."""
        self.done += spans / _SPANS

    def look_at_pairs(self, pairs: int) -> None:
        """Some pairs of a begin and an end were looked at together."""
        self.done += _BEGUN + pairs / _PAIRS

    def look_at_bounds(self, places: int, pairs: int) -> None:
        """Bounds were made of stages, at places and for pairs of them."""
        before = self.done
        self.look(2 * places)  # and of each place as many ends, for as many spans
        self.look_at_pairs(pairs)
        self._of_bounds += self.done - before
