"""The paper's Fig. 9: speedups of pipelines over data parallelism on 5 to 8 unlike GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from sparsepipe.results.fig9_paper import FIG9 as PAPER
from sparsepipe.results.fig9_paper import SMALLEST_HETE_MP
from sparsepipe.results.fig9_settings import GPUS, STRATEGIES, devices_of, strategy_of
from sparsepipe.results.report import fig9_bars as bars
from sparsepipe.results.report.cell import Cell, Column, Compare, Ours, Printed, Row, our_number
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.exhibit import Block, Exhibit
from sparsepipe.results.report.fig9_groups import Group, elsewhere, groups_of, matters
from sparsepipe.results.report.rows import unlike_notes
from sparsepipe.results.speedups import Bar, Chart, Mark, Panel, speedups_figure

SPEEDUP = Column(key="speedup", heading="speedup over DP", unit="x", compare=Compare.RATIO)
APART = Column(
    key="speedup_without_overlap", heading="over DP without overlap", unit="x", printed=False
)
OVER_HETE_MP = Column(key="over_hete_mp", heading="over HETE-MP", unit="x", printed=False)
TIME = Column(key="minibatch", heading="minibatch", unit="ms", form="{:.1f}", printed=False)
OFF = Column(
    key="off_simulation", heading="off the simulation", unit="%", form="{:+.1f}", printed=False
)
TIME_SCALE = Column(key="time_scale", heading="time scale", printed=False)
PLAN = Column(key="plan", heading="plan", printed=False)

Runs = Mapping[tuple[int, str], Sequence[Row]]
"""Of a group, by GPUs and strategy."""


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    groups = {group: _by_place(theirs) for group, theirs in groups_of(rows, commands).items()}
    (first, *others) = [_block(group, groups, commands) for group in groups]
    left_out = elsewhere(rows, commands)
    if not left_out:
        return [first, *others]
    names = ", ".join(str(row.get("run_id")) for row in left_out)
    note = f"Left out: {names}, whose hosts, GPUs or links inside hosts are not the paper's."
    return [replace(first, notes=(*first.notes, note)), *others]


def _by_place(rows: Sequence[Row]) -> Runs:
    return {
        (gpus, strategy): [
            row for row in rows if (devices_of(row), strategy_of(row)) == (gpus, strategy)
        ]
        for gpus in GPUS
        for strategy in STRATEGIES
    }


def _block(group: Group, groups: Mapping[Group, Runs], commands: Commands) -> Block:
    cells = [
        cell
        for gpus, strategy in groups[group]
        for cell in _cells(group, gpus, strategy, groups, commands)
    ]
    notes = [
        f"{STRATEGIES[strategy]} on {gpus} GPUs: {note}"
        for (gpus, strategy), runs in groups[group].items()
        for note in unlike_notes(runs, matters)
    ]
    return Block(
        title=group.title,
        cells=tuple(cells),
        notes=(*notes, *_unlimited(group, groups)),
        sweep=commands.sweep(*group.task),
    )


def _unlimited(group: Group, groups: Mapping[Group, Runs]) -> Iterator[str]:
    """Why there may be nothing over limited links although all was run."""
    loopback = replace(group, setting=replace(group.setting, network="loopback"))
    is_missing = group.setting.network == "namespaces" and not any(groups[group].values())
    if is_missing and loopback in groups:
        yield (
            "There are such runs on loopback, whose links are not limited. A run does not know who "
            "asks for it: as root, who may make namespaces, the same command leaves out what is "
            "finished; give it force=true."
        )


def _cells(
    group: Group, gpus: int, strategy: str, groups: Mapping[Group, Runs], commands: Commands
) -> Iterator[Cell]:
    """Of a bar."""

    def command_of(made: Group, other: str) -> str:
        return commands.one(*made.task, f"hardware=paper_{gpus}gpu", f"parallel={other}")

    beside, runs = group.simulated, groups[group]
    # Where the bar has runs, it is another one that a figure lacks.
    bases = {SPEEDUP: (group, "dp"), OVER_HETE_MP: (group, "hete_mp")}
    if beside is not None:
        bases[OFF] = beside, strategy
    there = {} if beside is None else groups.get(beside, {})
    simulated = None if beside is None else there.get((gpus, strategy), ())
    for column, ours in _figures(group.setting.kind, runs, gpus, strategy, simulated):
        lacking = (group, strategy) if not runs[gpus, strategy] else bases.get(column)
        yield Cell(
            row=(str(gpus), STRATEGIES[strategy]),
            column=column,
            paper=_printed(gpus, strategy) if column is SPEEDUP else None,
            ours=ours,
            command="" if lacking is None else command_of(*lacking),
        )


def _figures(
    kind: str, runs: Runs, gpus: int, strategy: str, simulated: Sequence[Row] | None
) -> Iterator[tuple[Column, Ours | None]]:
    """Those that there may be.

    Args:
        kind: simulated or emulated.
        runs: that came about alike.
        gpus: of the bar.
        strategy: of the bar.
        simulated: of the same bar; None where no simulation is beside it.
    """
    own = runs[gpus, strategy]
    of_gpus = [row for (count, _), rows in runs.items() if count == gpus for row in rows]
    yield SPEEDUP, bars.speedup(own, runs[gpus, "dp"], of_gpus)
    if kind == "simulated":
        yield APART, bars.speedup_without_overlap(own, of_gpus)
    if strategy != "hete_mp":
        yield OVER_HETE_MP, bars.over_runs(own, runs[gpus, "hete_mp"])
    yield TIME, bars.time(own)
    if simulated is not None:
        yield OFF, bars.off_percent(own, simulated)
    if kind == "emulated":
        yield TIME_SCALE, bars.time_scale(own)
    yield PLAN, bars.plan(own)


def _printed(gpus: int, strategy: str) -> Printed | None:
    paper = PAPER.get((gpus, strategy))
    if paper is None:
        return None
    return Printed(text=paper.text, derived=f"not printed: {paper.source}" if paper.derived else "")


def _draw(block: Block) -> Figure | None:
    """Bars by GPUs and strategy, as in the paper; None where there is none of ours."""
    drawn: dict[tuple[str, str], Bar] = {}
    marks: dict[tuple[str, str], Mark] = {}
    for (gpus, strategy), cells in block.rows.items():
        place, cell = (f"{gpus} GPUs", strategy), cells[SPEEDUP]
        if (ours := our_number(cell)) is not None:
            drawn[place] = Bar(value=ours, frame=our_number(cells.get(APART)))
        if cell.paper is not None and cell.paper.value is not None:
            marks[place] = Mark(value=cell.paper.value, derived=bool(cell.paper.derived))
    if not drawn:
        return None
    chart = Chart(
        groups=[f"{gpus} GPUs" for gpus in GPUS],
        strategies=list(STRATEGIES.values()),
        panels=[Panel(title=block.title, bars=drawn)],
        marks=marks,
        bar_label=SPEEDUP.title,
        frame_label="over DP without overlap",
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
        "while the backward runs; DP without overlap, which simulations tell, sums them after it."
    ),
    heads=("GPUs", "strategy"),
    find=_blocks,
    draw=_draw,
)
