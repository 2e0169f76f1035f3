"""Table I of Zhang and Sun: time, speedup and memory of pipelines of depth 1, 2, 4 and 8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sparsepipe.paper.printed import CITATION_OF_DEPTH, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed
from sparsepipe.report.measurements import mean_of, no_speedup, ratio_of, unlike_notes, words
from sparsepipe.report.tables import Key, cell_of, of_training, overrides_beside, tables_of
from sparsepipe.runs.ledger_table import Row, plan_text

IMAGES = 42_000
"""Number of training images in Zhang and Sun's study."""
MICROBATCHES = 32
"""T, the number of microbatches, unless ``parallel.strategy.microbatches`` is set."""
TIME = Column(key="time", heading="time of 42,000 images", unit="min")
SPEEDUP = Column(key="speedup", heading="speedup over serial", unit="x", compare=Compare.RATIO)
BUBBLE = Column(key="bubble", heading="bubble", unit="%", form="{:.1f}", printed=False)
BUSIEST = Column(
    key="busiest", heading="bubble of the busiest stage", unit="%", form="{:.1f}", printed=False
)
IDEAL = Column(
    key="ideal", heading="(K-1)/(T+K-1)", unit="%", form="{:.1f}", printed=False
)  # for equal stages
MEMORY = Column(key="memory", heading="memory", unit="MB", form="{:,.0f}")
FACTOR = Column(key="factor", heading="memory over serial", unit="x", compare=Compare.RATIO)
DEVICE = Column(
    key="device_memory", heading="most of a device", unit="MB", form="{:,.0f}", printed=False
)
PLAN = Column(key="plan", heading="cuts", printed=False)

_PAPER: Mapping[int, Mapping[str, str]] = {
    int(row["pipelines"]): row for row in printed("pipeline_depth")
}
_SCHEDULES = {
    "gpipe": "GPipe",
    "sync_1f1b": "1F1B",
    "eager_1f1b": "eager 1F1B",
    "asynchronous": "asynchronous",
}
"""Names of schedules by option of ``paper/schedule``."""
_PARTITIONS = {"variance": "variance", "straight": "ours"}
"""Names of partitions by value of ``paper.partition``."""


class DepthRow(NamedTuple):
    """A row of the table; its fields are values of ``study.cell``."""

    depth: int
    emulated: bool
    schedule: str = "serial"
    partition: str | None = None

    @property
    def label(self) -> tuple[str, ...]:
        return (
            str(self.depth),
            "emulated" if self.emulated else "measured",
            _SCHEDULES.get(self.schedule, self.schedule),
            _PARTITIONS.get(str(self.partition), "-"),
        )


ROWS = tuple(
    row
    for emulated, depths in ((False, (2,)), (True, (4, 8)))
    for row in (
        DepthRow(1, emulated),
        *(
            DepthRow(depth, emulated, schedule, partition)
            for depth in depths
            for schedule in _SCHEDULES
            for partition in _PARTITIONS
        ),
    )
)
"""All rows of the table."""
_SERIAL_COUNTED = DepthRow(1, emulated=True)
"""The serial row to which all memory is compared, whether measured or emulated."""

_OF_CELLS = ("paper/schedule", "paper/depth", "paper.partition")
_PARTS = "parallel.strategy.microbatches"
_PROFILES = "parallel.search.profiles"
_EFFORT = (
    *("data.source.test_images", "data.source.train_images", "hardware.time_scale"),
    *("trainer.limit_test_batches", "trainer.limit_train_batches", "trainer.limit_val_batches"),
    "trainer.max_epochs",
)
"""Settings that shorten a measurement; a note names the ones that runs override."""
_IN_TITLE = (_PARTS, "data", "data.batch_size", "model.convolutions", "model.width", _PROFILES)


def _pipeline_depth_blocks(rows: Sequence[Row]) -> list[Block]:
    runs = [row for row in rows if row["task_name"] in ("train", "train_emulated")]
    tables = tables_of(runs, _key_of) or [(_key_of({}), [])]
    blocks = []
    for key, table in sorted(tables, key=lambda table: [*map(str, table[0].values())]):
        width = "" if key["width"] == 1 else f" of width {key['width']:g}"
        parts = key.get("microbatches", MICROBATCHES)
        title = [
            {"Mnist": "MNIST"}.get(key["source"], "drawn digits"),
            f"{key['convolutions']} convolutions{width}",
            f"minibatches of {key['batch_size']} images, T = {parts}",
            *([key["profile"]] if key.get("profile") else ()),
            *key["overrides"],
        ]
        # Runs with a profile of their own are emulated.
        entries = [row for row in ROWS if row.emulated or not key.get("profile")]
        by_row: dict[DepthRow, list[Row]] = {entry: [] for entry in ROWS}
        for row in table:
            by_row.get(cell_of(row, *DepthRow._fields), []).append(row)
        notes = [
            f"{', '.join(entry.label)}: {note}"
            for entry in entries
            for note in unlike_notes(by_row[entry], of_training)
        ]
        of_effort = {word for row in table for word in overrides_beside(row, _OF_CELLS)}
        named = sorted(word for word in of_effort if word.partition("=")[0] in _EFFORT)
        if named:
            notes.append(f"Some runs were made with {', '.join(named)}.")
        cells = (cell for entry in entries for cell in _pipeline_depth_cells(entry, parts, by_row))
        blocks.append(Block(title="; ".join(title), cells=tuple(cells), notes=tuple(notes)))
    return blocks


def _key_of(row: Row) -> Key:
    key: dict[str, Any] = {
        "source": str(row.get("data.source._target_", "")).rpartition(".")[2],
        "batch_size": row.get("data.batch_size", 1024),
        "convolutions": row.get("model.convolutions", 24),
        "width": row.get("model.width", 1.0),
        "overrides": overrides_beside(row, (*_OF_CELLS, *_IN_TITLE, *_EFFORT)),
    }
    if row.get(_PARTS) is not None:  # serial and asynchronous rows belong to every T
        key["microbatches"] = row[_PARTS]
    if row.get("kind") == "emulated":
        key["profile"] = row.get(f"{_PROFILES}.core")
    return key


def _pipeline_depth_cells(
    entry: DepthRow, parts: int, by_row: Mapping[DepthRow, Sequence[Row]]
) -> Iterator[Cell]:
    runs, serial = by_row[entry], by_row[DepthRow(1, entry.emulated)]
    counted = runs if entry.depth > 1 else by_row[_SERIAL_COUNTED]
    own, base = mean_of(runs, _images_per_s), mean_of(serial, _images_per_s)
    speedup = ratio_of(own, base)
    if own and speedup and (reason := no_speedup(runs, serial, of="serial")):
        speedup = words("no speedup", own.runs, reason)
    factor = ratio_of(
        mean_of(counted, "kept_bytes"), mean_of(by_row[_SERIAL_COUNTED], "kept_bytes")
    )
    found: list[tuple[Column, Ours | None]] = [
        (TIME, mean_of(runs, _minutes)),
        (SPEEDUP, speedup),
        (MEMORY, mean_of(counted, "kept_bytes", scale=1e-6)),
        (FACTOR, factor),
        (DEVICE, mean_of(counted, "kept_bytes_of_device", scale=1e-6)),
    ]
    if entry.depth > 1:
        plans = dict.fromkeys(
            plan_text(str(run.get("plan_config")), run.get("plan_cuts") or ()) for run in runs
        )
        # An asynchronous pipeline does not drain after each update.
        is_drained = entry.schedule != "asynchronous"
        ideal = 100 * (entry.depth - 1) / (parts + entry.depth - 1)
        found += [
            (BUBBLE, mean_of(runs, "bubble_share", scale=100)),
            (BUSIEST, mean_of(runs, "bubble_share_of_busiest", scale=100)),
            (IDEAL, Ours(value=ideal, runs=tuple(runs)) if runs and is_drained else None),
            (PLAN, Ours(value=" or ".join(plans), runs=tuple(runs)) if runs else None),
        ]
    paper = _PAPER[entry.depth]
    texts = {
        TIME: paper["total_time_minutes"],
        SPEEDUP: paper["speedup"],
        MEMORY: paper["total_memory_mb"],
        FACTOR: paper["extra_memory_factor"],
    }
    for column, ours in found:
        yield Cell(
            row=entry.label,
            column=column,
            paper=Printed(text=texts[column]) if column in texts else None,
            ours=ours,
            expected=column is not IDEAL or entry.schedule != "asynchronous",
        )


def _images_per_s(row: Row) -> float | None:
    return row.get("samples_per_s" if row.get("kind") == "emulated" else "train_shapes_per_s")


def _minutes(row: Row) -> float | None:
    rate = _images_per_s(row)
    return None if not rate else IMAGES / rate / 60


PIPELINE_DEPTH = Chapter(
    name="pipeline_depth",
    title="Depth of pipelines (Zhang and Sun, Table I)",
    about=(
        "Zhang and Sun train a CNN with 5x5 kernels on 42,000 images of 28x28, in TensorFlow on 8 "
        "cores. Ours is a CNN of 5x5 convolutions, which are equal except for the first, with "
        f"T = {MICROBATCHES}. One and two stages are measured with one thread per process; four "
        "and eight are emulated on equal devices that take as long as one core did. Both kinds "
        "have a serial run of their own. Their time is that of a training whose number of epochs "
        "is not printed, ours that of 42,000 images: only ratios are compared. Our memory is that "
        "of parameters, optimizer state and stored activations on all devices, as torch counts "
        "it; theirs is that of the process. The bubble is the share of time in which stages wait "
        "while a minibatch is in the pipeline, or while an asynchronous pipeline is full; if "
        "stages differ, it exceeds (K-1)/(T+K-1), since they wait for the busiest one."
    ),
    heads=("stages", "obtained", "schedule", "partition"),
    find=_pipeline_depth_blocks,
    pictured=(SPEEDUP.key, FACTOR.key),
    citation=CITATION_OF_DEPTH,
)
