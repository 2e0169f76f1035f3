"""Trainings of the paper's network on shapes: which are of which row of Table II and Fig. 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.results.report.cell import Column, Compare, Ours, Row
from sparsepipe.results.report.overridden import of_memory, of_training
from sparsepipe.results.report.rows import mean_of, unlike_notes

TRAIN = Column(key="train_accuracy", heading="train accuracy", unit="%", compare=Compare.DIFFERENCE)
TEST = Column(key="test_accuracy", heading="test accuracy", unit="%", compare=Compare.DIFFERENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A row: which training.

    Attributes:
        resolution: voxels along each side of the grid.
        devices: how many; of several each takes a share of the data.
        network: sparse or dense.
        point_ratio: share of the points that are kept.
    """

    resolution: int
    devices: int = 1
    network: str
    point_ratio: float = 1.0

    def runs(self, rows: Sequence[Row], *, task: str = "train") -> list[Row]:
        """Those that are of this row, whatever their seed."""
        return [row for row in rows if row.get("task_name") == task and self.has(row)]

    def has(self, row: Row) -> bool:
        """Whether a run is of this row, whatever was done."""
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
        """Of the command line."""
        ratio = "" if self.point_ratio == 1 else f"_p{100 * self.point_ratio:03.0f}"
        return (f"network={self.network}{ratio}", f"data.resolution={self.resolution}")


def accuracy(runs: Sequence[Row], split: str) -> Ours | None:
    """Mean accuracy over seeds, in percent.

    Args:
        runs: trainings of one row.
        split: train or test.
    """
    return mean_of(runs, f"{split}/accuracy", scale=100)


def run_notes(asked: Asked, runs: Sequence[Row]) -> list[str]:
    """What is to be said of a row's runs that are averaged and not alike."""
    name = " ".join(asked.overrides)
    return [f"{name}: {note}" for note in unlike_notes(runs, of_training)]


def search_notes(asked: Asked, searches: Sequence[Row]) -> list[str]:
    """Likewise, of searches for a row's largest batch."""
    name = " ".join(asked.overrides)
    told = "sizes that any has tried count"
    notes = unlike_notes(searches, of_memory, of_one_seed=told)
    return [f"largest batch, {name}: {note}" for note in notes]


def budget_notes(rows: Sequence[Row]) -> list[str]:
    """Under which budgets of memory batches were tried."""
    budgets = dict.fromkeys(row["budget_bytes"] for row in rows if "budget_bytes" in row)
    return [
        f"A batch fits where a training step takes at most {budget / 1e6:,.0f} MB."
        for budget in sorted(budgets)
    ]
