"""Trainings of the paper's network on shapes, for Table II and Fig. 8, and largest batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sparsepipe.report.chapter import Block, Column, Compare, Ours
from sparsepipe.report.measurements import words
from sparsepipe.report.tables import Key, of_memory, overrides_beside, tables_of
from sparsepipe.runs.ledger_table import Row

TRAIN = Column(key="train_accuracy", heading="train accuracy", unit="%", compare=Compare.DIFFERENCE)
TEST = Column(key="test_accuracy", heading="test accuracy", unit="%", compare=Compare.DIFFERENCE)
FITTING = "fit_batch"
"""The task that searches for the largest batch."""
GENERATED = "GeneratedShapes"
_DATA = {
    GENERATED: "generated shapes",
    "NpzBundle": "ModelNet40 as point clouds",
    "OffTree": "meshes as OFF files",
    "NormalResampled": "ModelNet40 with normals",
}
"""Sources in words."""
IN_TITLES = (
    *("data.num_points", "data.source._target_", "data.source.train_per_class"),
    *("data.source.test_per_class", "model.width", "trainer.max_epochs"),
    "trainer.limit_train_batches",
)
"""Settings that the title of a table has as text."""

Make = Callable[[Sequence[Row]], Block]
"""Makes the cells and notes of a block from its runs."""


def blocks_of(rows: Sequence[Row], *, of_cells: Sequence[str], make: Make) -> list[Block]:
    """A block for each table of trainings; one without figures if no run exists.

    ``of_cells`` are the keys and groups that choose a cell.
    """
    measured = [row for row in rows if row["task_name"] in ("train", "train_if_fits", FITTING)]
    if not measured:
        return [_comparable(make([]), None)]
    tables = tables_of(measured, lambda row: _key_of(row, (*of_cells, *IN_TITLES, "data")))
    alike = Counter(_title({**key, "trial": ()}) for key, _ in tables)
    blocks = []
    for key, runs in sorted(tables, key=lambda table: [*map(str, _ordered(table[0]))]):
        is_alone = alike[_title({**key, "trial": ()})] == 1
        title = _title({**key, "trial": ()} if is_alone else key)
        blocks.append(_comparable(replace(make(runs), title=title), key["data"]))
    return blocks


def _key_of(row: Row, left_out: Sequence[str]) -> Key:
    """Values that runs of a table share; fewer for searches for the largest batch."""
    overrides = overrides_beside(row, left_out)
    of_size = [word for word in overrides if of_memory(word.partition("=")[0])]
    names = str(row.get("hardware_devices", "")).split(", ")
    key: dict[str, Any] = {
        "scale": row.get("scale"),
        "data": source_of(row),
        "points": row.get("data.num_points"),
        "shapes": row.get("data.source.train_per_class"),
        "width": row.get("model.width"),
        "device": ", ".join(name.partition(" x ")[2] or name for name in names),
        "overrides": tuple(of_size),
    }
    others = tuple(word for word in overrides if word not in of_size)
    if row["task_name"] == FITTING:
        budget, steps = row.get("task.budget_bytes"), row.get("task.steps")
        within = [] if budget is None else [f"batches within {budget / 1e6:,.0f} MB"]
        by = [] if steps is None else [f"batches tried by {_counted_text('step', steps)}"]
        return {**key, "trial": (*within, *by)}
    key |= {
        "tested": row.get("data.source.test_per_class"),
        "epochs": row.get("trainer.max_epochs"),
        "batches": row.get("trainer.limit_train_batches"),
        "of_training": others,
    }
    if key["shapes"] is not None:
        key["trained"] = None
    elif "train_shapes" in row:  # what does not fit has not counted its shapes
        key["trained"] = row["train_shapes"]
    if row.get("ranks") == 1:  # several devices go with any number of threads of one
        is_cpu = row.get("hardware_accelerator") == "cpu"
        key["threads"] = row.get("threads_per_rank") if is_cpu else None
    return key


def _ordered(key: Key) -> list[Any]:
    names = ("scale", "data", "points", "shapes", "tested", "trained", "width", "epochs", "batches")
    return [*map(key.get, (*names, "device", "threads", "trial")), _overrides(key)]


def _overrides(key: Key) -> tuple[str, ...]:
    return tuple(sorted((*key.get("overrides", ()), *key.get("of_training", ()))))


def source_of(row: Row) -> str:
    """The class of a run's source of shapes."""
    return str(row.get("data.source._target_", "")).rpartition(".")[2]


def data_text(row: Row) -> str:
    """Text such as ``generated shapes, 4,096 points``."""
    return _data_text(source_of(row), row.get("data.num_points"))


def _data_text(source: str, points: int | None) -> str:
    number = "all their points" if points is None else f"{points:,} points"
    return f"{_DATA.get(source, source)}, {number}"


def threads_text(threads: int | None) -> str:
    """Threads of one device in words; empty where unknown."""
    return "" if threads is None else f"{_counted_text('thread', threads)} a device"


def _title(key: Key) -> str:
    shapes = " + ".join(str(key[name]) for name in ("shapes", "tested") if key.get(name))
    batches = key.get("batches")
    if isinstance(batches, float) and batches <= 1:
        limit = f"epochs limited to {100 * batches:g} % of their batches"
    else:
        limit = f"epochs limited to {_counted_text('batch', batches or 0, several='batches')}"
    parts = [
        f"scale {key['scale']}" if key["scale"] else "",
        _data_text(key["data"], key["points"]),
        f"{shapes} shapes of a class" if shapes else "",
        f"{key['trained']:,} shapes" if key.get("trained") else "",
        f"width {key['width']:g}" if key["width"] is not None else "",
        _counted_text("epoch", key["epochs"]) if key.get("epochs") else "",
        limit if batches else "",
        *_overrides(key),
        *key.get("trial", ()),
        key["device"],
        threads_text(key.get("threads")),
    ]
    return "; ".join(part for part in parts if part)


def _counted_text(what: str, count: float, *, several: str = "") -> str:
    number = str(count) if isinstance(count, int) else f"{count:g}"
    return f"{number} {what if count == 1 else several or f'{what}s'}"


def _comparable(block: Block, source: str | None) -> Block:
    """The block; accuracies on generated shapes are not compared with those on ModelNet40."""
    if source not in (GENERATED, None):
        return block
    cells = [
        replace(cell, column=replace(cell.column, compare=Compare.NOT))
        if cell.column.compare is Compare.DIFFERENCE
        else cell
        for cell in block.cells
    ]
    return replace(block, cells=tuple(cells))


OF_MEMORY = frozenset({"over_budget", "out_of_memory", "killed_for_memory"})
"""Values of ``limited_by`` where memory ended the search."""
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
        most: the largest size that may fit, mean over the seeds; None unless memory has ended a
            search for each seed.
        ended: why other searches have ended.
    """

    runs: tuple[Row, ...]
    sizes: tuple[float, ...]
    most: float | None
    ended: tuple[str, ...]

    @property
    def least(self) -> float:
        return fmean(self.sizes)

    @property
    def why(self) -> str:
        return f"not memory ended the search, {' and '.join(self.ended)}"

    @property
    def ours(self) -> Ours:
        count = len(self.sizes)
        if self.most is None:
            bound = words(f"≥ {self.least:.0f}", self.runs, f"at least: {self.why}")
            return replace(bound, count=count)
        found = Ours(
            value=self.least,
            spread=(min(self.sizes), max(self.sizes)) if count > 1 else None,
            count=count,
            runs=self.runs,
        )
        if self.most <= self.least:
            return found
        between = f"the largest batch lies between {self.least:.0f} and {self.most:.0f}"
        return replace(found, note=f"{between}: sizes between were not tried")


def batch_searches(rows: Sequence[Row]) -> BatchSearches | None:
    """Combined batch searches, if there are any: for each seed the largest size that any found to
    fit, and the smallest that any found not to.
    """
    by_seed: dict[Any, list[Row]] = {}
    for row in rows:
        if row.get("largest_batch") is not None:
            by_seed.setdefault(row.get("seed"), []).append(row)
    if not by_seed:
        return None
    sizes, limits, others = [], [], []
    for runs in by_seed.values():
        fitting = max(float(run["largest_batch"]) for run in runs)
        refused = [
            float(run.get("refused_batch", run["largest_batch"] + 1))
            for run in runs
            if run.get("limited_by") in OF_MEMORY
        ]
        sizes.append(fitting)
        if refused:
            limits.append(max(fitting, min(refused) - 1))
        else:
            others += [str(run.get("limited_by")) for run in runs]
    return BatchSearches(
        runs=tuple(run for runs in by_seed.values() for run in runs),
        sizes=tuple(sizes),
        most=None if others else fmean(limits),
        ended=tuple(dict.fromkeys(OTHERS.get(reason, reason) for reason in others)),
    )


def batch_ratio(ours: BatchSearches, base: BatchSearches, *, of: str) -> Ours:
    """One largest batch over another; a bound or words if it is unknown."""
    runs = (*ours.runs, *base.runs)
    if not base.least:
        return words("no ratio", runs, f"no ratio: not one shape of {of} was seen to fit")
    if ours == base:
        return Ours(value=1.0, runs=ours.runs)
    if base.most is None:
        if ours.most is None:
            return words("no ratio", runs, f"no ratio: {ours.why}; of {of}: {base.why}")
        highest = ours.most / base.least
        return words(f"≤ {highest:.2f}", runs, f"at most: of {of}, {base.why}")
    lowest = ours.least / base.most
    if ours.most is None:
        return words(f"≥ {lowest:.2f}", runs, f"at least: {ours.why}")
    note = ""
    if (ours.least, base.least) != (ours.most, base.most):
        highest = ours.most / base.least
        note = f"the ratio lies between {lowest:.2f} and {highest:.2f}, as the batches do"
    return Ours(value=ours.least / base.least, runs=runs, note=note)
