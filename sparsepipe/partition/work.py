"""How much a search may look at: counted and not timed, so that it ends alike on any machine."""

from __future__ import annotations

from sparsepipe.errors import PlanError
from sparsepipe.partition.recomputed_plan import MORE_ROOM

MOST_LOOKS = 8_000_000
"""Looks of a search where the memory chooses layers: about a minute on one core, each being at a
place or at a choice of layers, or at some pairs of places where stages begin and end."""
_PAIRS = 1000
"""At which a look goes together; a few looks more have to be begun."""
_BEGUN = 10


class Work:
    """What a search has done, and what it may.

    Args:
        most: looks.
    """

    def __init__(self, most: float = float("inf")) -> None:
        self._most, self._allowed, self._done = most, most, 0.0

    @property
    def is_done(self) -> bool:
        """Whether no more may be done for now."""
        return self._done >= self._allowed

    @property
    def is_all_done(self) -> bool:
        """Whether no more may be done at all."""
        return self._done >= self._most

    def allow(self, *, turns: int) -> None:
        """Allows what comes next its part of what is left.

        Args:
            turns: how many are to come, with this one, each of which may do as much.
        """
        self._allowed = self._done + (self._most - self._done) / turns

    def look(self, looks: int) -> None:
        """So much was looked at."""
        self._done += looks

    def look_at_pairs(self, pairs: int) -> None:
        """Some pairs of a begin and an end were looked at together."""
        self._done += _BEGUN + pairs / _PAIRS


def no_more_work() -> PlanError:
    """The error of a search that has ended before it has found a plan."""
    return PlanError(
        "the search has looked at as much as it may, and at no plan that fits the memory; another "
        "one may fit",
        remedy=f"say which layers to recompute, as numbers or all; or use {MORE_ROOM}",
    )
