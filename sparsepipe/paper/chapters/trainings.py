"""Trainings of the paper's network on shapes, and its largest batches: Table II and Fig. 8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed
from sparsepipe.report.measurements import mean_of, no_speedup, ratio_of, unlike_notes, words
from sparsepipe.report.tables import (
    Key,
    cell_of,
    of_memory,
    of_training,
    overrides_beside,
    tables_of,
)
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
"""Names of data sources in titles, by class."""
IN_TITLES = (
    *("data.num_points", "data.source._target_", "data.source.train_per_class"),
    *("data.source.test_per_class", "model.width", "trainer.max_epochs"),
    "trainer.limit_train_batches",
)
"""Settings that the title of a table contains."""
_ORDER = (
    *("scale", "data", "points", "shapes", "tested", "trained", "width", "epochs", "batches"),
    *("device", "threads", "trial"),
)
"""Entries of the keys of tables by which these are in order."""

Make = Callable[[Sequence[Row]], Block]
"""Function that makes a block from its runs."""


def blocks_of(rows: Sequence[Row], *, of_cells: Sequence[str], make: Make) -> list[Block]:
    """A block for each table of trainings; a single empty one if no run exists.

    ``of_cells`` are the keys and groups of the configuration that choose a cell.
    """
    measured = [row for row in rows if row["task_name"] in ("train", "train_if_fits", FITTING)]
    if not measured:
        return [_comparable(make([]), None)]
    tables = tables_of(measured, lambda row: _key_of(row, (*of_cells, *IN_TITLES, "data")))
    alike = Counter(_title({**key, "trial": ()}) for key, _ in tables)
    blocks = []
    tables.sort(key=lambda pair: [*map(str, map(pair[0].get, _ORDER)), str(_overrides(pair[0]))])
    for key, runs in tables:
        is_alone = alike[_title({**key, "trial": ()})] == 1
        title = _title({**key, "trial": ()} if is_alone else key)
        blocks.append(_comparable(replace(make(runs), title=title), key["data"]))
    return blocks


def _key_of(row: Row, left_out: Sequence[str]) -> Key:
    """The values that runs of a table share; a search for the largest batch has fewer."""
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
    elif "train_shapes" in row:  # a run that does not fit has not counted its shapes
        key["trained"] = row["train_shapes"]
    if row.get("ranks") == 1:  # runs on several devices do not differ by threads
        is_cpu = row.get("hardware_accelerator") == "cpu"
        key["threads"] = row.get("threads_per_rank") if is_cpu else None
    return key


def _overrides(key: Key) -> tuple[str, ...]:
    return tuple(sorted((*key.get("overrides", ()), *key.get("of_training", ()))))


def source_of(row: Row) -> str:
    """The class name of a run's data source, such as ``GeneratedShapes``."""
    return str(row.get("data.source._target_", "")).rpartition(".")[2]


def data_text(source: str, points: int | None) -> str:
    """Text such as ``generated shapes, 4,096 points``; ``source``: class name; None: all points."""
    number = "all their points" if points is None else f"{points:,} points"
    return f"{_DATA.get(source, source)}, {number}"


def threads_text(threads: int | None) -> str:
    """Text such as ``4 threads a device``; empty if the number is unknown."""
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
        data_text(key["data"], key["points"]),
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
    """The block, without comparing accuracies on generated shapes to the paper's on ModelNet40."""
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
OTHERS = {"most": "task.most allows no larger one", "data": "the data have no more shapes"}
"""Reasons why a search ended, by other values of ``limited_by``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSearches:
    """Combined results of the searches for the largest batch of a cell.

    Attributes:
        runs: the searches.
        sizes: for each seed, the largest size that was seen to fit.
        most: the largest size that may fit, mean over the seeds; None unless memory ended a search
            for each seed.
        ended: why searches ended for the other seeds, as texts.
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
        return f"the search did not end for lack of memory: {' and '.join(self.ended)}"

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
    """The combined batch searches, if any: for each seed, the largest size that fitted in any
    search, and the smallest that did not.
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
    """Largest batch of ``ours`` over that of ``base``, named ``of``; else a bound or "no ratio"."""
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


TIME = Column(key="epoch_time", heading="epoch time", unit="s")
SPEEDUP = Column(key="speedup", heading="speedup over D-1", unit="x", compare=Compare.RATIO)
BATCH = Column(key="batch", heading="largest batch", unit="shapes a device", form="{:.0f}")
BATCHES = Column(key="batch_ratio", heading="batch over D-1", unit="x", compare=Compare.RATIO)

_OF_TABLE2 = ("paper/network", "paper/trial", "data.resolution")
Place = tuple[int, int, str, float]
"""A row of Table II: resolution of the grid, number of devices, network, share of the points."""
_PAPER_TABLE2: Mapping[Place, Mapping[str, str]] = {
    (int(row["resolution"]), int(row["num_gpus"]), row["network"], float(row["point_ratio_p"])): row
    for row in printed("table2")
}
_ELSEWHERE = "searched for on one device: each of several holds the whole network and its own batch"


def _table2_block(rows: Sequence[Row]) -> Block:
    trainings: dict[Place, list[Row]] = {place: [] for place in _PAPER_TABLE2}
    searches: dict[Place, list[Row]] = {place: [] for place in _PAPER_TABLE2}
    names = ("resolution", "devices", "network", "point_ratio")
    for row in rows:
        found = {FITTING: searches, "train": trainings}.get(row["task_name"], {})
        found.get(cell_of(row, *names), []).append(row)
    budgets = {row["budget_bytes"] for row in rows if "budget_bytes" in row}
    notes = [
        f"A batch fits where a training step takes at most {budget / 1e6:,.0f} MB."
        for budget in sorted(budgets)
    ]
    for place in _PAPER_TABLE2:
        label = ", ".join(_label(place))
        notes += [f"{label}: {note}" for note in unlike_notes(trainings[place], of_training)]
        kept = unlike_notes(
            searches[place], of_memory, of_one_seed="sizes that any has tried count"
        )
        notes += [f"largest batch, {label}: {note}" for note in kept]
    cells = (each for place in _PAPER_TABLE2 for each in _table2_cells(place, trainings, searches))
    return Block(cells=tuple(cells), notes=tuple(notes))


def _label(place: Place) -> tuple[str, ...]:
    resolution, devices, network, ratio = place
    return f"{resolution}³", str(devices), network, f"{ratio:g}"


def _table2_cells(
    place: Place, trainings: Mapping[Place, list[Row]], searches: Mapping[Place, list[Row]]
) -> Iterator[Cell]:
    resolution, devices, network, point_ratio = place
    first = (resolution, 1, "dense", 1.0)  # D-1
    runs, of_first = trainings[place], trainings[first]
    reason = no_speedup(runs, of_first, of="D-1")
    time = mean_of(runs, "epoch_time_s")
    # Rates are compared, since epochs may differ in length.
    rate, base = mean_of(runs, "train_shapes_per_s"), mean_of(of_first, "train_shapes_per_s")
    speedup = words("no speedup", rate.runs, reason) if rate and reason else ratio_of(rate, base)
    batch = batch_searches(searches[resolution, 1, network, point_ratio])
    batch_of_first = batch_searches(searches[first])
    largest = batch.ours if batch else None
    ratio = batch_ratio(batch, batch_of_first, of="D-1") if batch and batch_of_first else None
    if devices > 1:
        largest, ratio = _noted(largest, _ELSEWHERE), _noted(ratio, _ELSEWHERE)
    theirs = _PAPER_TABLE2[place]
    printed_ratio = int(theirs["batch_size"]) / int(_PAPER_TABLE2[first]["batch_size"])
    for column, text, ours in (
        (TRAIN, theirs["train_accuracy_percent"], mean_of(runs, "train/accuracy", scale=100)),
        (TEST, theirs["test_accuracy_percent"], mean_of(runs, "test/accuracy", scale=100)),
        (TIME, theirs["epoch_time_s"], _noted(time, reason)),
        (SPEEDUP, theirs["speedup_over_D1_1gpu"], speedup),
        (BATCH, theirs["batch_size"], largest),
        (BATCHES, f"{printed_ratio:g}", ratio),
    ):
        derived = "not printed: the ratio of two batch sizes that are" if column is BATCHES else ""
        paper = Printed(text=text, derived=derived)
        yield Cell(row=_label(place), column=column, paper=paper, ours=ours)


def _noted(ours: Ours | None, note: str) -> Ours | None:
    if ours is None or not note:
        return ours
    return replace(ours, note=f"{ours.note}; {note}" if ours.note else note)


TABLE2 = Chapter(
    name="table2",
    title="Table II: dense and sparse, on one device and on four",
    about=(
        "VGG16 with batch normalization, dense and sparse, on one device and on four with data "
        "parallelism. p is the share of the points that is kept, in training and in testing. "
        "D-1 is the dense network on one device at the same resolution; the speedup is that of "
        "shapes trained per second. Seconds and batch sizes depend on device and size of the "
        "network: only their ratios are compared with the paper's. The paper trained on "
        "ModelNet40 for 90 epochs, on GPUs of its Table I."
    ),
    heads=("grid", "devices", "network", "p"),
    find=lambda rows: blocks_of(rows, of_cells=_OF_TABLE2, make=_table2_block),
    citation=CITATION,
    pictured=(TRAIN.key, TEST.key, SPEEDUP.key, BATCHES.key),
)


RATE = Column(
    key="inference_rate", heading="inference", unit="shapes/s", form="{:.1f}", printed=False
)
MEMORY = Column(
    key="memory", heading="memory of a training step", unit="MB", form="{:,.0f}", printed=False
)
_FROM_TABLE = "not printed with Fig. 8: from Table II"
_OF_FIG8 = ("paper/network", "data.resolution")
_ROWS = tuple((grid, network) for grid in (32, 50, 100, 200) for network in ("dense", "sparse"))
_PAPER_FIG8: Mapping[tuple[int, str], Mapping[str, str]] = {
    (int(row["resolution"]), row["network"]): row
    for row in printed("table2")
    if row["num_gpus"] == "1" and row["point_ratio_p"] == "1"
}


def _fig8_blocks(rows: Sequence[Row]) -> list[Block]:
    trainings = [
        row
        for row in rows
        if row["task_name"] == "train_if_fits" and row.get("study.cell.point_ratio", 1) == 1
    ]
    return blocks_of(trainings, of_cells=_OF_FIG8, make=_fig8_block)


def _fig8_block(rows: Sequence[Row]) -> Block:
    cells: list[Cell] = []
    notes: list[str] = []
    for grid, network in _ROWS:
        place = (grid, network)
        runs = [row for row in rows if cell_of(row, "resolution", "network") == place]
        notes += [f"{network} at {grid}³: {note}" for note in unlike_notes(runs, of_training)]
        refused = _refused([run for run in runs if run.get("fits") is False])
        paper = _PAPER_FIG8.get(place, {})
        train, test = paper.get("train_accuracy_percent"), paper.get("test_accuracy_percent")
        for column, text, ours in (
            (TRAIN, train, mean_of(runs, "train/accuracy", scale=100)),
            (TEST, test, mean_of(runs, "test/accuracy", scale=100)),
            (RATE, None, mean_of(runs, "inference_shapes_per_s")),
            (MEMORY, None, mean_of(runs, "step_memory_bytes", scale=1e-6)),
        ):
            shown = ours or refused
            if refused is not None and ours is not None:
                names = ", ".join(str(run.get("run_id")) for run in refused.runs)
                shown = replace(ours, note=f"without {names}: {refused.note}")
            elif refused is not None and column is MEMORY:
                run = refused.runs[0]
                if run.get("budget_bytes") and run.get("limited_by") == "over_budget":
                    shown = replace(refused, value=f"over {run['budget_bytes'] / 1e6:,.0f}")
            theirs = Printed(text=text, derived=_FROM_TABLE) if text else None
            cells.append(Cell(row=(f"{grid}³", network), column=column, paper=theirs, ours=shown))
    return Block(cells=tuple(cells), notes=tuple(notes))


def _refused(runs: Sequence[Row]) -> Ours | None:
    """The words ``does not fit`` for runs whose training step did not fit; None without runs."""
    if not runs:
        return None
    first = runs[0]
    why = str(first.get("limited_by") or "over_budget").replace("_", " ")
    budget = first.get("budget_bytes")
    limit = f", the budget is {budget / 1e6:,.0f} MB" if budget else ""
    step = f"a training step of {first.get('data.batch_size')} shapes"
    return words("does not fit", runs, f"{step} does not fit: {why}{limit}")


FIG8 = Chapter(
    name="fig8",
    title="Fig. 8: accuracy, inference rate and memory over the resolution",
    about=(
        "VGG16, dense and sparse, on one device, on grids of 32³ to 200³; dense until a training "
        "step no longer fits into memory. The paper draws accuracies without numbers: those at "
        "32³ and 50³ are from its Table II; it prints none for 100³ and 200³. It says that the "
        "dense network could not be held in memory at 100³ and 200³."
    ),
    heads=("grid", "network"),
    find=_fig8_blocks,
    citation=CITATION,
    pictured=(TRAIN.key, TEST.key, RATE.key, MEMORY.key),
)
