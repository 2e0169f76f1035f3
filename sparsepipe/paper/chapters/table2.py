"""The paper's Table II: dense and sparse networks on one and on four GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from sparsepipe.paper.chapters.training_settings import (
    FITTING,
    OF_TRIALS,
    Setting,
    blocks_of,
    data_notes,
)
from sparsepipe.paper.chapters.trainings import (
    TEST,
    TRAIN,
    TrainingRow,
    accuracy,
    batch_searches,
    budget_notes,
    ratio,
    run_notes,
    search_notes,
)
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed, Row
from sparsepipe.report.commands import Commands
from sparsepipe.report.measurements import mean_of, no_speedup, ratio_of

TIME = Column(key="epoch_time", heading="epoch time", unit="s")
SPEEDUP = Column(key="speedup", heading="speedup over D-1", unit="x", compare=Compare.RATIO)
BATCH = Column(key="batch", heading="largest batch", unit="shapes a device", form="{:.0f}")
BATCHES = Column(key="batch_ratio", heading="batch over D-1", unit="x", compare=Compare.RATIO)

_OF_SEARCHES = (*OF_TRIALS, *(f"task.{key}" for key in ("most", "precision", "start", "timeout_s")))
"""Settings of a search for the largest batch."""
_PAPER: Mapping[TrainingRow, Mapping[str, str]] = {
    TrainingRow(
        resolution=int(row["resolution"]),
        devices=int(row["num_gpus"]),
        network=row["network"],
        point_ratio=float(row["point_ratio_p"]),
    ): row
    for row in printed("table2")
}


def _first(entry: TrainingRow) -> TrainingRow:
    """D-1, the dense network on one device at the same resolution."""
    return TrainingRow(resolution=entry.resolution, network="dense")


def _cell_of(row: Row) -> tuple[str, ...] | None:
    entry = next((each for each in _PAPER if each.has(row)), None)
    if entry is None:
        return None
    return _fit(entry) if row.get("task_name") == FITTING else _train(entry)


def _train(entry: TrainingRow) -> tuple[str, ...]:
    trial = "one_device" if entry.devices == 1 else "four_devices"
    return (f"paper/trial={trial}", *entry.overrides)


def _fit(entry: TrainingRow) -> tuple[str, ...]:
    return ("paper/trial=largest_batch", *entry.overrides)


def _block(rows: Sequence[Row], commands: Commands, setting: Setting | None) -> Block:
    if setting is None:  # trainings refuse what is requested of searches
        trial = tuple(word for word in commands.of_task if word.partition("=")[0] in _OF_SEARCHES)
    else:
        trial = _trial(setting, rows, commands)
    return Block(
        title="" if setting is None else setting.title,
        cells=tuple(cell for entry in _PAPER for cell in _cells(entry, rows, commands, trial)),
        notes=(
            *budget_notes(rows),
            *data_notes(commands),
            *(note for entry in _PAPER for note in run_notes(entry, entry.runs(rows))),
            *(note for entry in _PAPER for note in search_notes(entry, _searches(entry, rows))),
        ),
        sweep=_sweep(commands, trial),
    )


def _trial(setting: Setting, rows: Sequence[Row], commands: Commands) -> tuple[str, ...]:
    """Overrides of unusual searches for the largest batch; trainings do not take them."""
    searches = [row for row in rows if row.get("task_name") == FITTING]
    trial = {key: row[key] for row in searches for key in OF_TRIALS if key in row}
    where = (*setting.overrides, "paper/trial=largest_batch")
    return commands.unlike(where, trial) if trial else ()


def _sweep(commands: Commands, trial: Sequence[str]) -> str:
    if not trial:
        return commands.sweep()
    trainings = commands.sweep("paper/trial=one_device,four_devices")
    return f"{trainings} && {commands.sweep('paper/trial=largest_batch', *trial)}"


def _cells(
    entry: TrainingRow, rows: Sequence[Row], commands: Commands, trial: Sequence[str]
) -> list[Cell]:
    runs, paper = entry.runs(rows), _PAPER[entry]
    first, base = _first(entry), _PAPER[_first(entry)]
    of_first = first.runs(rows)
    training, fitting = commands.one(*_train(entry)), commands.one(*_fit(entry), *trial)
    theirs = int(paper["batch_size"]) / int(base["batch_size"])
    batch, batches = _batches(entry, rows)
    found: list[tuple[Column, Printed, Ours | None, str]] = [
        (TRAIN, Printed(text=paper["train_accuracy_percent"]), accuracy(runs, "train"), training),
        (TEST, Printed(text=paper["test_accuracy_percent"]), accuracy(runs, "test"), training),
        (TIME, Printed(text=paper["epoch_time_s"]), _time(runs, of_first), training),
        (
            SPEEDUP,
            Printed(text=paper["speedup_over_D1_1gpu"]),
            _speedup(runs, of_first),
            commands.one(*_train(first)) if runs else training,  # what it lacks, if it does
        ),
        (BATCH, Printed(text=paper["batch_size"]), batch, fitting),
        (
            BATCHES,
            Printed(
                text=f"{theirs:g}", derived="not printed: the ratio of two batch sizes that are"
            ),
            batches,
            commands.one(*_fit(first), *trial) if batch else fitting,
        ),
    ]
    row = (
        f"{entry.resolution}³",
        str(entry.devices),
        entry.network,
        f"{entry.point_ratio:g}",
    )
    return [
        Cell(row=row, column=column, paper=printed_, ours=ours, command=made_by)
        for column, printed_, ours, made_by in found
    ]


def _time(runs: Sequence[Row], first: Sequence[Row]) -> Ours | None:
    found = mean_of(runs, "epoch_time_s")
    reason = _reason(runs, first)
    return replace(found, note=reason) if found and reason else found


def _speedup(runs: Sequence[Row], first: Sequence[Row]) -> Ours | None:
    """Shapes a second over those of D-1: epochs may be of unlike length."""
    rate, base = mean_of(runs, "train_shapes_per_s"), mean_of(first, "train_shapes_per_s")
    if rate is not None and (reason := _reason(runs, first)):
        return Ours(value="no speedup", runs=rate.runs, note=reason, counts=False)
    return None if rate is None or base is None else ratio_of(rate, base)


def _reason(runs: Sequence[Row], first: Sequence[Row]) -> str:
    """Why runs have no speedup over D-1; empty where they have one."""
    base = first[0] if first else None
    reasons = (no_speedup(run, base, of="D-1") for run in runs)
    return next((reason for reason in reasons if reason), "")


def _searches(entry: TrainingRow, rows: Sequence[Row]) -> list[Row]:
    """Searches for the largest batch of a row; none with several devices."""
    return entry.runs(rows, task=FITTING)


def _batches(entry: TrainingRow, rows: Sequence[Row]) -> tuple[Ours | None, Ours | None]:
    """The largest batch and its ratio to that of D-1, both on one device."""
    found = batch_searches(_searches(replace(entry, devices=1), rows))
    base = batch_searches(_searches(_first(entry), rows))
    ours = None if found is None else found.ours
    over_base = None if found is None or base is None else ratio(found, base, of="D-1")
    if entry.devices == 1:
        return ours, over_base
    return _of_one_device(ours), _of_one_device(over_base)


def _of_one_device(ours: Ours | None) -> Ours | None:
    """The figure, with a note in rows of several devices that it is of one."""
    if ours is None:
        return None
    where = "searched for on one device: each of several holds the whole network and its own batch"
    return replace(ours, note=f"{ours.note}; {where}" if ours.note else where)


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
    find=partial(blocks_of, cell_of=_cell_of, make=_block),
    citation=CITATION,
    pictured=(TRAIN.key, TEST.key, SPEEDUP.key, BATCHES.key),
)
