"""The rows of the study of depth: depth, schedule, partition, and how figures are obtained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparsepipe.results.report.cell import Row

_SCHEDULES = {
    "gpipe": "GPipe",
    "sync_1f1b": "1F1B",
    "eager_1f1b": "eager 1F1B",
    "asynchronous": "asynchronous",
}
_PARTITIONS = {"variance": "variance", "straight": "ours"}
_TASKS = ("train", "train_emulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A row.

    Attributes:
        depth: K.
        schedule: by the option of the trial; empty of one device.
        partition: the search; empty of one device.
        emulated: it is; else measured.
    """

    depth: int
    schedule: str = ""
    partition: str = ""
    emulated: bool

    @property
    def label(self) -> tuple[str, ...]:
        kind = "emulated" if self.emulated else "measured"
        name = _SCHEDULES.get(self.schedule, "serial")
        return (str(self.depth), kind, name, _PARTITIONS.get(self.partition, "-"))

    @property
    def trial(self) -> str:
        """Its option of that group."""
        if self.depth == 1:
            return f"pipeline_depth/serial{'_emulated' * self.emulated}"
        return f"pipeline_depth/{self.schedule}_{self.depth}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Of the command that makes a run of it."""
        cuts = () if self.depth == 1 else (f"partition={self.partition}",)
        return (f"trial={self.trial}", *cuts)

    @property
    def serial(self) -> Asked:
        """What its speedup is over."""
        return Asked(depth=1, emulated=self.emulated)

    def runs(self, rows: Sequence[Row]) -> list[Row]:
        """Those that are of it, whatever their seed."""
        return [row for row in rows if asked_of(row) == self]


ROWS = tuple(
    asked
    for emulated, depths in ((False, (2,)), (True, (4, 8)))
    for asked in (
        Asked(depth=1, emulated=emulated),
        *(
            Asked(depth=depth, schedule=schedule, partition=partition, emulated=emulated)
            for depth in depths
            for schedule in _SCHEDULES
            for partition in _PARTITIONS
        ),
    )
)
"""Of the whole table."""


def asked_of(row: Row) -> Asked | None:
    """The row of the table that a run is of; None where it is of none.

    Runs that recompute layers are of none: they are slower and keep less.
    """
    ranks, kind = row.get("ranks"), row.get("kind")
    emulated = kind == "emulated"
    if kind not in ("measured", "emulated") or row.get("task_name") not in _TASKS:
        return None
    if row.get("recomputed_layers"):
        return None
    if row.get("strategy") == "single":
        found = Asked(depth=1, emulated=emulated)
    else:
        way = str(row.get("parallel.strategy._target_", "")).rpartition(".")[2]
        schedule = {None: "asynchronous", "1f1b": "sync_1f1b"}.get(
            row.get("schedule"), row.get("schedule")
        )
        if way not in ("PipelineStrategy", "SynchronousPipelineStrategy") or ranks is None:
            return None
        found = Asked(
            depth=int(ranks),
            schedule=str(schedule),
            partition=str(row.get("parallel.search.search")),
            emulated=emulated,
        )
    return found if found in ROWS else None
