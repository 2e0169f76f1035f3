"""Trainings of the paper's network on shapes: rows of Table II and Fig. 8, and largest batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sparsepipe.report.chapter import Column, Compare, Ours, Row
from sparsepipe.report.measurements import mean_of, unlike_notes
from sparsepipe.report.overrides import of_memory, of_training

TRAIN = Column(key="train_accuracy", heading="train accuracy", unit="%", compare=Compare.DIFFERENCE)
TEST = Column(key="test_accuracy", heading="test accuracy", unit="%", compare=Compare.DIFFERENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """A row: which training."""

    resolution: int
    devices: int = 1
    network: str
    point_ratio: float = 1.0

    def runs(self, rows: Sequence[Row], *, task: str = "train") -> list[Row]:
        """Runs of this row, with any seed."""
        return [row for row in rows if row.get("task_name") == task and self.has(row)]

    def has(self, row: Row) -> bool:
        """Whether a run of any task belongs to this row."""
        ways = str(row.get("parallel.strategy._target_", "")).rpartition(".")[2]
        return (
            row.get("kind", "measured") == "measured"
            and row.get("data.resolution") == self.resolution
            and row.get("representation") == self.network
            and row.get("data.point_ratio", 1.0) == self.point_ratio
            and row.get("ranks") == self.devices
            and (self.devices == 1 or ways == "DataParallelStrategy")
        )

    @property
    def overrides(self) -> tuple[str, ...]:
        ratio = "" if self.point_ratio == 1 else f"_p{100 * self.point_ratio:03.0f}"
        return (f"paper/network={self.network}{ratio}", f"data.resolution={self.resolution}")


def accuracy(runs: Sequence[Row], split: str) -> Ours | None:
    """Mean accuracy over seeds, in percent."""
    return mean_of(runs, f"{split}/accuracy", scale=100)


def run_notes(entry: TrainingRow, runs: Sequence[Row]) -> list[str]:
    """Notes on runs of a row that are averaged but differ."""
    name = " ".join(entry.overrides)
    return [f"{name}: {note}" for note in unlike_notes(runs, of_training)]


def search_notes(entry: TrainingRow, searches: Sequence[Row]) -> list[str]:
    """Notes on batch searches of a row that are averaged but differ."""
    name = " ".join(entry.overrides)
    which = "sizes that any has tried count"
    notes = unlike_notes(searches, of_memory, of_one_seed=which)
    return [f"largest batch, {name}: {note}" for note in notes]


def budget_notes(rows: Sequence[Row]) -> list[str]:
    """Notes on the memory budgets of batch searches."""
    budgets = dict.fromkeys(row["budget_bytes"] for row in rows if "budget_bytes" in row)
    return [
        f"A batch fits where a training step takes at most {budget / 1e6:,.0f} MB."
        for budget in sorted(budgets)
    ]


OF_MEMORY = frozenset({"over_budget", "out_of_memory", "killed_for_memory"})
"""Values of ``limited_by`` that say that memory ended the search."""
OTHERS = {
    "most": "larger ones were not to be tried (task.most)",
    "data": "there are no more shapes to train on",
}
"""Other values of ``limited_by``, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearches:
    """Combined results of searches for the same largest batch.

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


def batch_searches(rows: Sequence[Row]) -> BatchSearches | None:
    """Summary of batch searches; None without any."""
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
    return BatchSearches(
        runs=tuple(run for runs in by_seed.values() for run in runs),
        sizes=tuple(map(_seen_to_fit, by_seed.values())),
        most=None if others else fmean(known),
        ended=tuple(dict.fromkeys(OTHERS.get(reason, reason) for reason in others)),
    )


def ratio(ours: BatchSearches, base: BatchSearches, *, of: str) -> Ours:
    """One largest batch over another; a bound or in words where there is none."""
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


def _because(found: BatchSearches) -> str:
    return f"not memory ended the search, {' and '.join(found.ended)}"


def _seen_to_fit(runs: Sequence[Row]) -> float:
    """The largest size that fitted in searches with one seed."""
    return max(float(run["largest_batch"]) for run in runs)


def _may_fit(runs: Sequence[Row]) -> float | None:
    """The largest size that no search has excluded; None where none has ended for memory."""
    refused = [
        float(run.get("refused_batch", run["largest_batch"] + 1))
        for run in runs
        if run.get("limited_by") in OF_MEMORY
    ]
    return max(_seen_to_fit(runs), min(refused) - 1) if refused else None
