"""The paper's Fig. 9: speedups of pipelines over data parallelism on 5 to 8 unlike GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.fig9_runs import (
    GPUS,
    STRATEGIES,
    Group,
    devices_of,
    dp_minibatch_s,
    elsewhere,
    groups_of,
    matters,
    minibatch_s,
    strategy_of,
)
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.plots.speedups import Bar, Chart, Mark, Panel, speedups_figure
from sparsepipe.report.chapter import (
    Block,
    Cell,
    Chapter,
    Column,
    Compare,
    Ours,
    Printed,
    Row,
    our_number,
)
from sparsepipe.report.commands import Commands
from sparsepipe.report.measurements import mean_of, unlike_notes
from sparsepipe.runs.ledger_table import plan_text

_PARALLEL = {"MP": "paper_mp", "HETE-MP": "hete_mp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSpeedup:
    """A bar of the paper."""

    text: str
    source: str
    derived: bool = False

    @property
    def value(self) -> float:
        return float(self.text)


PRINTED: Mapping[tuple[int, str], PaperSpeedup] = {
    (int(row["num_gpus"]), _PARALLEL[row["strategy"]]): PaperSpeedup(
        text=row["speedup_over_dp"], source=row["source"], derived=row["derived"] == "yes"
    )
    for row in printed("fig9")
    if row["num_gpus"] != "any"
}
"""Printed speedups by GPUs and ``parallel``; those of MP are of the paper's own splits."""

(SMALLEST_HETE_MP,) = (
    float(row["speedup_over_dp"]) for row in printed("fig9") if row["num_gpus"] == "any"
)
"""Printed of HETE-MP over 5 to 8 GPUs, not of which: by the others, of 6 or 7."""


def _bar_speedup(runs: Sequence[Row], own: Sequence[Row], others: Sequence[Row]) -> Ours | None:
    """Over data parallelism: its own runs, or what other runs have computed for it."""
    known = [row.get("dp_minibatch_s") for row in others]
    return _over(runs, dp_minibatch_s([minibatch_s(row) for row in own], known), own)


def _bar_speedup_without_overlap(runs: Sequence[Row], others: Sequence[Row]) -> Ours | None:
    """Over data parallelism that sums gradients after the backward, which simulations compute."""
    known = [row.get("dp_without_overlap_minibatch_s") for row in others]
    return _over(runs, dp_minibatch_s([], known), ())


def _bar_over_runs(runs: Sequence[Row], base: Sequence[Row]) -> Ours | None:
    """How many times as fast as other runs, in the mean of these."""
    return _over(runs, dp_minibatch_s([minibatch_s(row) for row in base], ()), base)


def _bar_off_percent(runs: Sequence[Row], simulated: Sequence[Row]) -> Ours | None:
    """Percent by which the emulation is faster than its simulation."""
    ratio = _bar_over_runs(runs, simulated)
    if ratio is None:
        return None
    spread = ratio.spread and (_percent(ratio.spread[0]), _percent(ratio.spread[1]))
    return replace(ratio, value=_percent(float(ratio.value)), spread=spread)


def _bar_time_scale(runs: Sequence[Row]) -> Ours | None:
    """Time scales of emulations, whose results are in the cluster's seconds."""
    known = [row for row in runs if row.get("time_scale")]
    texts = dict.fromkeys(f"{row['time_scale']:g}" for row in known)
    return Ours(value=" or ".join(texts), runs=tuple(known)) if known else None


def _bar_plan(runs: Sequence[Row]) -> Ours | None:
    """The plan as text; several if runs have different ones."""
    if not runs:
        return None
    plans = dict.fromkeys(
        plan_text(str(run.get("plan_config") or devices_of(run)), run.get("plan_cuts") or ())
        for run in runs
    )
    return Ours(value=" or ".join(plans), runs=tuple(runs))


def _over(runs: Sequence[Row], base_s: float | None, base: Sequence[Row]) -> Ours | None:
    """The base's time over that of the runs, with the base's runs among its sources."""
    if base_s is None:
        return None
    found = mean_of(runs, lambda row: base_s / minibatch_s(row))
    if found is None:
        return None
    others = [run for run in base if not any(run is each for each in found.runs)]
    return replace(found, runs=(*found.runs, *others))


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


SPEEDUP = Column(key="speedup", heading="speedup over DP", unit="x", compare=Compare.RATIO)
APART = Column(
    key="speedup_without_overlap", heading="over DP without overlap", unit="x", printed=False
)
OVER_HETE_MP = Column(key="over_hete_mp", heading="over HETE-MP", unit="x", printed=False)
TIME = Column(key="minibatch", heading="minibatch", unit="ms", form="{:.1f}", printed=False)
OFF = Column(
    key="off_simulation", heading="off the simulation", unit="%", form="{:+.1f}", printed=False
)
TIME_SCALE = Column(key="time_scale", heading="time scale", unit="x", printed=False)
PLAN = Column(key="plan", heading="plan", printed=False)

Runs = Mapping[tuple[int, str], Sequence[Row]]
"""Runs of a group, by GPUs and strategy."""


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
    """A note where limited links lack runs that exist without limits."""
    loopback = replace(group, setting=replace(group.setting, network="loopback"))
    is_missing = group.setting.network == "namespaces" and not any(groups[group].values())
    if is_missing and loopback in groups:
        yield (
            "There are such runs on loopback, whose links are not limited. A run's identity does "
            "not include the user: as root, who may make namespaces, the same command skips what "
            "is finished; give it force=true."
        )


def _cells(
    group: Group, gpus: int, strategy: str, groups: Mapping[Group, Runs], commands: Commands
) -> Iterator[Cell]:
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
    own = runs[gpus, strategy]
    of_gpus = [row for (count, _), rows in runs.items() if count == gpus for row in rows]
    yield SPEEDUP, _bar_speedup(own, runs[gpus, "dp"], of_gpus)
    if kind == "simulated":
        yield APART, _bar_speedup_without_overlap(own, of_gpus)
    if strategy != "hete_mp":
        yield OVER_HETE_MP, _bar_over_runs(own, runs[gpus, "hete_mp"])
    yield TIME, mean_of(own, minibatch_s, scale=1e3)
    if simulated is not None:
        yield OFF, _bar_off_percent(own, simulated)
    if kind == "emulated":
        yield TIME_SCALE, _bar_time_scale(own)
    yield PLAN, _bar_plan(own)


def _printed(gpus: int, strategy: str) -> Printed | None:
    paper = PRINTED.get((gpus, strategy))
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


FIG9 = Chapter(
    name="fig9",
    title="Fig. 9: pipelines over data parallelism on unlike GPUs",
    about=(
        "How many times as fast as data parallelism (DP) pipelines train a sparse VGG16 at 50³ in "
        "batches of 64, on 5 to 8 GPUs of the two servers of Table I. Layers take as long as the "
        "authors measured; no GPU of ours is in it. The paper prints five of its bars, and as the "
        f"smallest of HETE-MP {SMALLEST_HETE_MP}, not for how many GPUs; nor does it print the "
        "speed of the link between the servers, hence several. MP is by our search, beside it with "
        "the paper's split (its Table III), with which its figure is compared. DP sums gradients "
        "while the backward runs; DP without overlap, of simulations alone, sums them after it."
    ),
    heads=("GPUs", "strategy"),
    find=_blocks,
    citation=CITATION,
    draw=_draw,
)
