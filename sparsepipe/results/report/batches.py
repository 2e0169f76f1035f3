"""The largest batch that fits, and its ratio to another one, as far as searches have told.

A search tells the largest batch only where memory ended it: then it lies between a size that fits
and a larger one that does not. Where the search ended for another reason, larger batches may fit;
such a figure is a bound, and is not set against the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sparsepipe.results.report.cell import Ours, Row
from sparsepipe.results.report.rows import mean_of

_OF_MEMORY = frozenset({"over_budget", "out_of_memory", "killed_for_memory"})
"""Values of ``limited_by`` that say that memory ended the search."""
_OTHERS = {
    "most": "larger ones were not to be tried (task.most)",
    "data": "there are no more shapes to train on",
    "too_slow": "the next size took too long (task.timeout_s)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What searches for the same batch have found.

    Attributes:
        runs: the searches.
        least: the largest size that was seen to fit, the mean over the searches.
        most: the largest size that may fit, likewise; None where memory has not ended them all.
        ended: why others have ended.
    """

    runs: tuple[Row, ...]
    least: float
    most: float | None
    ended: tuple[str, ...]

    @property
    def ours(self) -> Ours:
        """As a figure of its own."""
        if self.most is None:
            return Ours(
                value=f"≥ {self.least:.0f}",
                count=len(self.runs),
                runs=self.runs,
                note=f"at least: {_because(self)}",
                counts=False,
            )
        found = mean_of(self.runs, "largest_batch")
        assert found is not None
        if self.most <= self.least:
            return found
        between = f"the largest batch lies between {self.least:.0f} and {self.most:.0f}"
        return replace(found, note=f"{between}: sizes between were not tried")


def searched(rows: Sequence[Row]) -> Searched | None:
    """What searches have found; None where there is none.

    Args:
        rows: of ``task=fit_batch``, alike but for their seed.
    """
    runs = tuple(row for row in rows if row.get("largest_batch") is not None)
    if not runs:
        return None
    others = [str(run.get("limited_by")) for run in runs if not _by_memory(run)]
    return Searched(
        runs=runs,
        least=fmean(float(run["largest_batch"]) for run in runs),
        most=None if others else fmean(_may_fit(run) for run in runs),
        ended=tuple(dict.fromkeys(_OTHERS.get(reason, reason) for reason in others)),
    )


def ratio(ours: Searched, base: Searched, *, of: str) -> Ours:
    """One largest batch over another; a bound or in words where no more can be told.

    Args:
        ours: the one.
        base: the other.
        of: what the other is of, in print.
    """
    runs = (*ours.runs, *base.runs)
    if not base.least:
        return _words("no ratio", runs, f"no ratio: not one shape of {of} was seen to fit")
    if ours == base:
        return Ours(value=1.0, runs=ours.runs)
    if base.most is None:
        if ours.most is None:
            why = f"{_because(ours)}; of {of}: {_because(base)}"
            return _words("no ratio", runs, f"no ratio: {why}")
        highest = ours.most / base.least
        return _words(f"≤ {highest:.2f}", runs, f"at most: of {of}, {_because(base)}")
    lowest = ours.least / base.most
    if ours.most is None:
        return _words(f"≥ {lowest:.2f}", runs, f"at least: {_because(ours)}")
    note = ""
    if (ours.least, base.least) != (ours.most, base.most):
        highest = ours.most / base.least
        note = f"the ratio lies between {lowest:.2f} and {highest:.2f}, as the batches do"
    return Ours(value=ours.least / base.least, runs=runs, note=note)


def _words(value: str, runs: tuple[Row, ...], note: str) -> Ours:
    return Ours(value=value, runs=runs, note=note, counts=False)


def _because(found: Searched) -> str:
    return f"not memory ended the search, {' and '.join(found.ended)}"


def _by_memory(run: Row) -> bool:
    return run.get("limited_by") in _OF_MEMORY


def _may_fit(run: Row) -> float:
    """The largest size that the search has left open."""
    largest = float(run["largest_batch"])
    return max(largest, float(run.get("refused_batch", largest + 1)) - 1)
