"""The largest batch that fits, and its ratio to another one, as far as searches have told.

A search tells the largest batch only where memory ended it: then it lies between a size that fits
and a larger one that does not. Where the search ended for another reason, larger batches may fit;
such a figure is a bound, and is not set against the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sparsepipe.results.report.cell import Ours, Row

OF_MEMORY = frozenset({"over_budget", "out_of_memory", "killed_for_memory"})
"""Values of ``limited_by`` that say that memory ended the search."""
OTHERS = {
    "most": "larger ones were not to be tried (task.most)",
    "data": "there are no more shapes to train on",
}
"""Its other values, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What searches for the same batch have found, those with one seed together.

    Attributes:
        runs: the searches.
        sizes: the largest size that was seen to fit, for each seed.
        most: the largest size that may fit, the mean over the seeds; None where memory has not
            ended a search for each.
        ended: why searches for other seeds have ended.
    """

    runs: tuple[Row, ...]
    sizes: tuple[float, ...]
    most: float | None
    ended: tuple[str, ...]

    @property
    def least(self) -> float:
        """The largest size that was seen to fit, the mean over the seeds."""
        return fmean(self.sizes)

    @property
    def ours(self) -> Ours:
        """As a figure of its own."""
        if self.most is None:
            return Ours(
                value=f"≥ {self.least:.0f}",
                count=len(self.sizes),
                runs=self.runs,
                note=f"at least: {_because(self)}",
                counts=False,
            )
        found = Ours(
            value=self.least,
            spread=(min(self.sizes), max(self.sizes)) if len(self.sizes) > 1 else None,
            count=len(self.sizes),
            runs=self.runs,
        )
        if self.most <= self.least:
            return found
        between = f"the largest batch lies between {self.least:.0f} and {self.most:.0f}"
        return replace(found, note=f"{between}: sizes between were not tried")


def searched(rows: Sequence[Row]) -> Searched | None:
    """What searches have found; None where there is none.

    Args:
        rows: of ``task=fit_batch``, alike but for their seed, and for where they began and ended.
    """
    by_seed: dict[Any, list[Row]] = {}
    for row in rows:
        if row.get("largest_batch") is not None:
            by_seed.setdefault(row.get("seed"), []).append(row)
    if not by_seed:
        return None
    limits = [_may_fit(runs) for runs in by_seed.values()]
    known = [limit for limit in limits if limit is not None]
    others = [
        str(run.get("limited_by"))
        for runs, limit in zip(by_seed.values(), limits, strict=True)
        for run in runs
        if limit is None
    ]
    return Searched(
        runs=tuple(run for runs in by_seed.values() for run in runs),
        sizes=tuple(map(_seen_to_fit, by_seed.values())),
        most=None if others else fmean(known),
        ended=tuple(dict.fromkeys(OTHERS.get(reason, reason) for reason in others)),
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
    return run.get("limited_by") in OF_MEMORY


def _seen_to_fit(runs: Sequence[Row]) -> float:
    """The largest size that any search with one seed has seen to fit."""
    return max(float(run["largest_batch"]) for run in runs)


def _may_fit(runs: Sequence[Row]) -> float | None:
    """The largest size that all have left open; None where memory has ended none of them."""
    refused = [
        float(run.get("refused_batch", run["largest_batch"] + 1)) for run in runs if _by_memory(run)
    ]
    return max(_seen_to_fit(runs), min(refused) - 1) if refused else None
