"""Table I of Zhang and Sun: time, speedup and memory of pipelines of depth 1, 2, 4 and 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sparsepipe.paper.chapters.depth_runs import (
    MICROBATCHES,
    ROWS,
    DepthRow,
    DepthSetting,
    depth_row_of,
    mean_notes,
    override_notes,
    settings_of,
)
from sparsepipe.paper.printed import CITATION_OF_DEPTH, printed
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed, Row
from sparsepipe.report.commands import Commands, missing_commands
from sparsepipe.report.measurements import mean_of, no_speedup, ratio_of
from sparsepipe.runs.ledger_table import plan_text

IMAGES = 42_000
"""Training images of the study."""
TIME = Column(key="time", heading="time of 42,000 images", unit="min")
SPEEDUP = Column(key="speedup", heading="speedup over serial", unit="x", compare=Compare.RATIO)
BUBBLE = Column(key="bubble", heading="bubble", unit="%", form="{:.1f}", printed=False)
BUSIEST = Column(
    key="busiest", heading="bubble of the busiest stage", unit="%", form="{:.1f}", printed=False
)
IDEAL = Column(
    key="ideal", heading="(K-1)/(T+K-1)", unit="%", form="{:.1f}", printed=False
)  # of stages that are alike
MEMORY = Column(key="memory", heading="memory", unit="MB", form="{:,.0f}")
FACTOR = Column(key="factor", heading="memory over serial", unit="x", compare=Compare.RATIO)
DEVICE = Column(
    key="device_memory", heading="most of a device", unit="MB", form="{:,.0f}", printed=False
)
PLAN = Column(key="plan", heading="cuts", printed=False)

_PAPER: Mapping[int, Mapping[str, str]] = {
    int(row["pipelines"]): row for row in printed("pipeline_depth")
}


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    groups = settings_of([row for row in rows if depth_row_of(row) is not None], commands)
    made_by = {each: commands.giving(*each.overrides(commands)) for each in groups}
    notes = {
        each: override_notes([(row, each.command(row, commands)) for row in runs], commands)
        for each, runs in groups.items()
    }
    anywhere = replace(commands, scales=())  # it is the same at any scale
    existing = [
        each.giving(*each.given, *group.parts_of("gpipe")) for group, each in made_by.items()
    ]
    missing = missing_commands(anywhere, existing)
    usual = DepthSetting()
    return [
        *(
            _block(setting, groups[setting], theirs, notes=notes[setting])
            for setting, theirs in made_by.items()
        ),
        *(
            replace(_block(usual, [], theirs), title=title or usual.title)
            for title, theirs in missing.items()
        ),
    ]


def _block(
    setting: DepthSetting, rows: Sequence[Row], commands: Commands, *, notes: Sequence[str] = ()
) -> Block:
    """A table: all of it, or emulated rows alone where these have a profile of their own."""
    entries = ROWS if setting.profile is None else tuple(each for each in ROWS if each.emulated)
    cells = [cell for each in entries for cell in _cells(each, setting, rows, commands)]
    means = (note for each in entries for note in mean_notes(each.label, each.runs(rows)))
    return Block(
        title=setting.title,
        cells=tuple(cells),
        notes=(*notes, *means),
        sweep=_sweep(entries, setting, commands),
    )


def _sweep(entries: Sequence[DepthRow], setting: DepthSetting, commands: Commands) -> str:
    """The sweep of all rows; two sweeps if not all rows take the setting's microbatches."""
    schedules: dict[tuple[str, ...], dict[str, None]] = {}
    for each in entries:
        schedules.setdefault(setting.parts_of(each.schedule), {})[each.schedule] = None
    depths: tuple[str, ...] = ()
    if entries != ROWS:
        depths = (f"paper/depth={','.join(dict.fromkeys(each.depth_option for each in entries))}",)
    if len(schedules) == 1:
        return commands.sweep(*depths)
    found = (
        commands.sweep(f"paper/schedule={','.join(names)}", *depths, *parts)
        for parts, names in schedules.items()
    )
    return " && ".join(found)


def _cells(
    entry: DepthRow, setting: DepthSetting, rows: Sequence[Row], commands: Commands
) -> list[Cell]:
    runs, paper = entry.runs(rows), _PAPER[entry.depth]
    threads = () if entry.emulated else ("OMP_NUM_THREADS=1",)
    one_thread = commands.giving(*commands.given, environment=threads)
    command = one_thread.one(*entry.overrides, *setting.parts_of(entry.schedule))
    # What is kept on one device does not depend on who counts it, and an emulation has a profile.
    counted = runs if entry.depth > 1 else DepthRow(depth=1, emulated=True).runs(rows)
    memory_command = command if entry.depth > 1 else commands.one(*_SERIAL_COUNTED.overrides)
    found: list[tuple[Column, str | None, Ours | None, str]] = [
        (TIME, paper["total_time_minutes"], mean_of(runs, _minutes), command),
        (
            SPEEDUP,
            paper["speedup"],
            _speedup(runs, entry.serial.runs(rows)),
            one_thread.one(*entry.serial.overrides) if runs else command,
        ),
        (MEMORY, paper["total_memory_mb"], _scaled(counted, "kept_bytes"), memory_command),
        (
            FACTOR,
            paper["extra_memory_factor"],
            _factor(counted, _SERIAL_COUNTED.runs(rows)),
            commands.one(*_SERIAL_COUNTED.overrides) if counted else memory_command,
        ),
        (DEVICE, None, _scaled(counted, "kept_bytes_of_device"), memory_command),
    ]
    if entry.depth > 1:
        found += [
            (BUBBLE, None, mean_of(runs, "bubble_share", scale=100), command),
            (BUSIEST, None, mean_of(runs, "bubble_share_of_busiest", scale=100), command),
            (IDEAL, None, _ideal(entry, setting, runs), command),
            (PLAN, None, _plan(runs), command),
        ]
    return [
        Cell(
            row=entry.label,
            column=column,
            paper=None if text is None else Printed(text=text),
            ours=ours,
            command="" if column is IDEAL and entry.schedule == "asynchronous" else made_by,
        )
        for column, text, ours, made_by in found
    ]


_SERIAL_COUNTED = DepthRow(depth=1, emulated=True)


def _rate(row: Row) -> float | None:
    """Images a second; of emulations in the steady part."""
    key = "samples_per_s" if row.get("kind") == "emulated" else "train_shapes_per_s"
    return row.get(key)


def _minutes(row: Row) -> float | None:
    rate = _rate(row)
    return None if not rate else IMAGES / rate / 60


def _scaled(rows: Sequence[Row], key: str) -> Ours | None:
    return mean_of(rows, key, scale=1e-6)


def _speedup(runs: Sequence[Row], serial: Sequence[Row]) -> Ours | None:
    own, base = mean_of(runs, _rate), mean_of(serial, _rate)
    if own is None or base is None:
        return None
    first = serial[0]
    if reason := next((why for run in runs if (why := no_speedup(run, first, of="serial"))), ""):
        return Ours(value="no speedup", runs=own.runs, note=reason, counts=False)
    return ratio_of(own, base)


def _factor(runs: Sequence[Row], serial: Sequence[Row]) -> Ours | None:
    own, base = mean_of(runs, "kept_bytes"), mean_of(serial, "kept_bytes")
    return None if own is None or base is None else ratio_of(own, base)


def _ideal(entry: DepthRow, setting: DepthSetting, runs: Sequence[Row]) -> Ours | None:
    """The ideal bubble; None for an asynchronous pipeline, which does not drain after updates."""
    if entry.schedule == "asynchronous" or not runs:
        return None
    return Ours(value=100 * setting.ideal_bubble(entry.depth), runs=tuple(runs))


def _plan(runs: Sequence[Row]) -> Ours | None:
    if not runs:
        return None
    texts = dict.fromkeys(
        plan_text(str(run.get("plan_config")), run.get("plan_cuts") or ()) for run in runs
    )
    return Ours(value=" or ".join(texts), runs=tuple(runs))


PIPELINE_DEPTH = Chapter(
    name="pipeline_depth",
    title="Depth of pipelines (Zhang and Sun, Table I)",
    about=(
        "Zhang and Sun train a CNN with 5x5 kernels on 42,000 images of 28x28, in TensorFlow on 8 "
        "cores. The same study: a CNN of 5x5 convolutions, all but the first one alike, "
        f"T = {MICROBATCHES}. One and two stages are measured with one thread a process, four and "
        "eight emulated on equal devices that take as long as one core was measured to; each kind "
        "has a serial run of its own. Theirs is the time of their training, of which they print "
        "no epochs, ours that of 42,000 images: only ratios are set against each other. Memory is "
        "parameters, optimizer state and stored activations of all devices by torch's own count; "
        "theirs is the process's. The bubble is the share of the time in which stages wait while "
        "a minibatch is in the pipeline, of the asynchronous one while that is full; where stages "
        "are not alike it is larger than (K-1)/(T+K-1), as the lesser ones wait for the busiest."
    ),
    heads=("stages", "obtained", "schedule", "partition"),
    find=_blocks,
    pictured=(SPEEDUP.key, FACTOR.key),
    citation=CITATION_OF_DEPTH,
)
