"""The paper's Table II: dense and sparse networks on one and on four GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sparsepipe.paper.chapters.trainings import (
    FITTING,
    TEST,
    TRAIN,
    batch_ratio,
    batch_searches,
    blocks_of,
)
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed
from sparsepipe.report.measurements import mean_of, no_speedup, ratio_of, unlike_notes, words
from sparsepipe.report.tables import cell_of, of_memory, of_training
from sparsepipe.runs.ledger_table import Row

TIME = Column(key="epoch_time", heading="epoch time", unit="s")
SPEEDUP = Column(key="speedup", heading="speedup over D-1", unit="x", compare=Compare.RATIO)
BATCH = Column(key="batch", heading="largest batch", unit="shapes a device", form="{:.0f}")
BATCHES = Column(key="batch_ratio", heading="batch over D-1", unit="x", compare=Compare.RATIO)

_OF_CELLS = ("paper/network", "paper/trial", "data.resolution")
Place = tuple[int, int, str, float]
"""Grid, devices, network and share of the points."""
_PAPER: Mapping[Place, Mapping[str, str]] = {
    (
        int(row["resolution"]),
        int(row["num_gpus"]),
        row["network"],
        float(row["point_ratio_p"]),
    ): row
    for row in printed("table2")
}
_ELSEWHERE = "searched for on one device: each of several holds the whole network and its own batch"


def _table2_block(rows: Sequence[Row]) -> Block:
    trainings: dict[Place, list[Row]] = {place: [] for place in _PAPER}
    searches: dict[Place, list[Row]] = {place: [] for place in _PAPER}
    names = ("resolution", "devices", "network", "point_ratio")
    for row in rows:
        found = {FITTING: searches, "train": trainings}.get(row["task_name"], {})
        found.get(cell_of(row, *names), []).append(row)
    budgets = {row["budget_bytes"] for row in rows if "budget_bytes" in row}
    notes = [
        f"A batch fits where a training step takes at most {budget / 1e6:,.0f} MB."
        for budget in sorted(budgets)
    ]
    for place in _PAPER:
        label = ", ".join(_label(place))
        notes += [f"{label}: {note}" for note in unlike_notes(trainings[place], of_training)]
        kept = unlike_notes(
            searches[place], of_memory, of_one_seed="sizes that any has tried count"
        )
        notes += [f"largest batch, {label}: {note}" for note in kept]
    return Block(
        cells=tuple(cell for place in _PAPER for cell in _table2_cells(place, trainings, searches)),
        notes=tuple(notes),
    )


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
    # Epochs may be of unlike length, so that rates are compared.
    rate, base = mean_of(runs, "train_shapes_per_s"), mean_of(of_first, "train_shapes_per_s")
    speedup = words("no speedup", rate.runs, reason) if rate and reason else ratio_of(rate, base)
    batch = batch_searches(searches[resolution, 1, network, point_ratio])
    batch_of_first = batch_searches(searches[first])
    largest = batch.ours if batch else None
    ratio = batch_ratio(batch, batch_of_first, of="D-1") if batch and batch_of_first else None
    if devices > 1:
        largest, ratio = _noted(largest, _ELSEWHERE), _noted(ratio, _ELSEWHERE)
    theirs = _PAPER[place]
    printed_ratio = int(theirs["batch_size"]) / int(_PAPER[first]["batch_size"])
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
        "D-1 is the dense network on one device at the same resolution; the speedup is of shapes "
        "trained in a second. Seconds and batch sizes depend on device and size of the network: "
        "only their ratios are set against the paper's. The paper trained on ModelNet40 for 90 "
        "epochs, on GPUs of its Table I."
    ),
    heads=("grid", "devices", "network", "p"),
    find=lambda rows: blocks_of(rows, of_cells=_OF_CELLS, make=_table2_block),
    citation=CITATION,
    pictured=(TRAIN.key, TEST.key, SPEEDUP.key, BATCHES.key),
)
