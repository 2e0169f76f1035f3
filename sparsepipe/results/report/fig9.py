"""The paper's Fig. 9: speedups of pipelines over data parallelism on 5 to 8 unlike GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from sparsepipe.results.fig9_paper import FIG9 as PAPER
from sparsepipe.results.fig9_paper import SMALLEST_HETE_MP
from sparsepipe.results.fig9_settings import (
    GPUS,
    STRATEGIES,
    devices_of,
    dp_minibatch_s,
    minibatch_s,
    strategy_of,
)
from sparsepipe.results.report.cell import Cell, Column, Compare, Ours, Printed, Row, our_number
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.exhibit import Block, Exhibit
from sparsepipe.results.report.fig9_groups import Group, elsewhere, groups_of, matters
from sparsepipe.results.report.rows import mean_of, unlike_notes
from sparsepipe.results.speedups import Bar, Chart, Mark, Panel, speedups_figure
from sparsepipe.results.sweep_table import plan_text

SPEEDUP = Column(key="speedup", heading="speedup over DP", unit="x", compare=Compare.RATIO)
TIME = Column(key="minibatch", heading="minibatch", unit="ms", form="{:.1f}", printed=False)
PLAN = Column(key="plan", heading="plan", printed=False)


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    found = [_block(group, theirs, commands) for group, theirs in groups_of(rows, commands).items()]
    (first, *others), left_out = found, elsewhere(rows, commands)
    if not left_out:
        return found
    names = ", ".join(str(row.get("run_id")) for row in left_out)
    note = f"Left out: {names}, whose hosts, GPUs or links inside hosts are not the paper's."
    return [replace(first, notes=(*first.notes, note)), *others]


def _block(group: Group, rows: Sequence[Row], commands: Commands) -> Block:
    by_place = {
        (gpus, strategy): [
            row for row in rows if (devices_of(row), strategy_of(row)) == (gpus, strategy)
        ]
        for gpus in GPUS
        for strategy in STRATEGIES
    }
    cells = []
    for (gpus, strategy), runs in by_place.items():
        label = (str(gpus), STRATEGIES[strategy])
        made_by = commands.one(*group.task, f"hardware=paper_{gpus}gpu", f"parallel={strategy}")
        of_gpus = [row for row in rows if devices_of(row) == gpus]
        cells += [
            Cell(
                row=label,
                column=SPEEDUP,
                paper=_printed(gpus, strategy),
                ours=_speedup(runs, by_place[gpus, "dp"], of_gpus),
                command=made_by,
            ),
            Cell(row=label, column=TIME, ours=_time(runs), command=made_by),
            Cell(row=label, column=PLAN, ours=_plan(runs), command=made_by),
        ]
    notes = [
        f"{STRATEGIES[strategy]} on {gpus} GPUs: {note}"
        for (gpus, strategy), runs in by_place.items()
        for note in unlike_notes(runs, matters)
    ]
    return Block(
        title=group.title,
        cells=tuple(cells),
        notes=tuple(notes),
        sweep=commands.sweep(*group.task),
    )


def _printed(gpus: int, strategy: str) -> Printed | None:
    paper = PAPER.get((gpus, strategy))
    if paper is None:
        return None
    return Printed(text=paper.text, derived=f"not printed: {paper.source}" if paper.derived else "")


def _time(runs: Sequence[Row]) -> Ours | None:
    return mean_of(runs, minibatch_s, scale=1e3)


def _speedup(runs: Sequence[Row], own: Sequence[Row], others: Sequence[Row]) -> Ours | None:
    """Over data parallelism: its own runs, or what the others tell of it."""
    dp_s = dp_minibatch_s(
        [minibatch_s(row) for row in own], [row.get("dp_minibatch_s") for row in others]
    )
    if dp_s is None:
        return None
    base_s = dp_s
    return mean_of(runs, lambda row: base_s / minibatch_s(row))


def _plan(runs: Sequence[Row]) -> Ours | None:
    if not runs:
        return None
    plans = dict.fromkeys(
        plan_text(str(run.get("plan_config") or devices_of(run)), run.get("plan_cuts") or ())
        for run in runs
    )
    return Ours(value=" or ".join(plans), runs=tuple(runs))


def _draw(block: Block) -> Figure | None:
    """Bars by GPUs and strategy, as in the paper; None where there is none of ours."""
    bars: dict[tuple[str, str], Bar] = {}
    marks: dict[tuple[str, str], Mark] = {}
    for cell in block.cells:
        place = (f"{cell.row[0]} GPUs", cell.row[1])
        if cell.column is not SPEEDUP:
            continue
        if (ours := our_number(cell)) is not None:
            bars[place] = Bar(value=ours)
        if cell.paper is not None and cell.paper.value is not None:
            marks[place] = Mark(value=cell.paper.value, derived=bool(cell.paper.derived))
    if not bars:
        return None
    chart = Chart(
        groups=[f"{gpus} GPUs" for gpus in GPUS],
        strategies=list(STRATEGIES.values()),
        panels=[Panel(title=block.title, bars=bars)],
        marks=marks,
        bar_label=SPEEDUP.title,
        mark_label="the paper's",
    )
    return speedups_figure(chart)


FIG9 = Exhibit(
    name="fig9",
    title="Fig. 9: pipelines over data parallelism on unlike GPUs",
    about=(
        "How many times as fast as data parallelism (DP) pipelines train a sparse VGG16 at 50³ in "
        "batches of 64, on 5 to 8 GPUs of the two servers of Table I. Layers take as long as the "
        "authors measured; no GPU of ours is in it. The paper prints five of its bars, and as the "
        f"smallest of HETE-MP {SMALLEST_HETE_MP}, not for how many GPUs; nor does it print the "
        "speed of the link between the servers, hence several. MP is by our search, beside it with "
        "the paper's split (its Table III), with which its figure is compared. DP sums gradients "
        "while the backward runs."
    ),
    heads=("GPUs", "strategy"),
    find=_blocks,
    draw=_draw,
)
