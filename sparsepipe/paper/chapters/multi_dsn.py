"""Several domains: accuracy on targets without labels, and the memory of a worker of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.measured_steps import (
    MEMORY,
    SAVED,
    Setting,
    Size,
    draw_curves,
    notes_of,
    settings_of,
    size_text,
    sizes_of,
    values_at,
)
from sparsepipe.paper.printed import CITATION_OF_BIGCONV
from sparsepipe.plots import style
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Ours, Row, our_number
from sparsepipe.report.commands import Commands
from sparsepipe.report.measurements import mean_of, ratio_of

_TARGETS: Mapping[str, tuple[str, ...]] = {
    "digit_domains": (
        "blended",
        "inverted",
        "noisy",
        "blurred",
        "thick",
        "slanted",
        "low_resolution",
        "coloured",
    ),
    "shape_domains": ("partial", "noisy", "occluded", "density", "rotated"),
}
"""Of each ``paper/network``."""
_MEAN = "mean of the targets"
_WAYS = {
    way: Column(key=way, heading=heading, unit="%", form="{:.1f}", printed=False)
    for way, heading in {
        "source_only": "source only",
        "dsn": "DSN",
        "supervised": "target's labels",
        "dann": "DANN",
        "without_difference": "no difference",
        "without_reconstruction": "no reconstruction",
        "without_similarity": "no similarity",
        "with_mse": "MSE for SI-MSE",
    }.items()
}
"""Columns by ``paper.training``."""
_GAIN = Column(
    key="gain", heading="DSN over source only", unit="points", form="{:+.1f}", printed=False
)
_ALWAYS = {"digit_domains": tuple(_WAYS), "shape_domains": ("source_only", "dsn")}
"""What the commands of the experiment train, and a table lacks where no run has."""


def _network(row: Row) -> str:
    return str(row.get("hydra.choices.paper/network", "digit_domains"))


def way_of(row: Row) -> str:
    """The ``paper.training`` of a run."""
    words = (str(each).lstrip("+") for each in row.get("hydra.overrides") or ())
    found = [word.partition("=")[2] for word in words if word.startswith("paper.training=")]
    return found[-1] if found else "dsn"


def _overrides(network: str, way: str, target: str) -> tuple[str, ...]:
    words = (f"paper/network={network}", f"paper.training={way}")
    labelled = _TARGETS[network][0] if target == _MEAN else target
    return (*words, f"data.source={labelled}") if way == "supervised" else words


def _accuracy_command(row: Row) -> tuple[str, ...] | None:
    network, way = _network(row), way_of(row)
    if network not in _TARGETS or way not in _WAYS:
        return None
    return _overrides(network, way, str(row.get("data.source")))


def _accuracies(rows: Sequence[Row], commands: Commands) -> list[Block]:
    found = settings_of(rows, commands, _accuracy_command, task="train")
    return [
        _accuracy_block(network, setting, [row for row in runs if _network(row) == network], theirs)
        for setting, (runs, theirs) in found.items()
        for network in _TARGETS
        if not runs or any(_network(row) == network for row in runs)
    ]


def _accuracy_block(
    network: str, setting: Setting, rows: Sequence[Row], commands: Commands
) -> Block:
    by_way = {way: [row for row in rows if way_of(row) == way] for way in _WAYS}
    needed = () if setting.is_partial and rows else _ALWAYS[network]
    ways = [way for way, runs in by_way.items() if runs or way in needed]
    cells: list[Cell] = []
    for target in (*_TARGETS[network], _MEAN):
        for way in ways:
            made_by = commands.one(*_overrides(network, way, target))
            ours = _accuracy(network, way, target, by_way[way])
            cells.append(Cell(row=(target,), column=_WAYS[way], ours=ours, command=made_by))
        gain = _gain(by_way, _key(target))
        cells.append(Cell(row=(target,), column=_GAIN, ours=gain))
    one = commands.sweep(
        f"paper/network={network}", f"paper.training={','.join(_unlabelled(ways))}"
    )
    if "supervised" in ways:
        sources = f"data.source={','.join(_TARGETS[network])}"
        words = (f"paper/network={network}", "paper.training=supervised", sources)
        one = f"{one} && {commands.sweep(*words)}"
    return Block(
        title=f"{setting.title}; {network.replace('_', ' ')}",
        cells=tuple(cells),
        notes=tuple(
            note for way in _unlabelled(ways) for note in notes_of(_WAYS[way].heading, by_way[way])
        ),
        sweep=one,
    )


def _unlabelled(ways: Iterable[str]) -> list[str]:
    return [way for way in ways if way != "supervised"]


def _key(target: str) -> str:
    return "test/target_accuracy" if target == _MEAN else f"test/{target}/accuracy"


def _accuracy(network: str, way: str, target: str, runs: Sequence[Row]) -> Ours | None:
    """Mean over seeds; with a target's labels, of the runs that had these."""
    if way != "supervised":
        return mean_of(runs, _key(target), scale=100)
    if target != _MEAN:
        own = [row for row in runs if row.get("data.source") == target]
        return mean_of(own, _key(target), scale=100)
    each = [_accuracy(network, way, one, runs) for one in _TARGETS[network]]
    known = [one for one in each if one is not None]
    if len(known) < len(each):
        return None
    total = sum(float(one.value) for one in known)
    return Ours(value=total / len(known), runs=tuple(run for one in known for run in one.runs))


def _gain(by_way: Mapping[str, Sequence[Row]], key: str) -> Ours | None:
    """Points that DSN is above training on the source alone, seed by seed."""
    alone = {row.get("seed"): row for row in by_way["source_only"] if key in row}
    both = [(row, alone[row.get("seed")]) for row in by_way["dsn"] if row.get("seed") in alone]
    points = [100 * (float(own[key]) - float(base[key])) for own, base in both if key in own]
    if not points:
        return None
    return Ours(
        value=sum(points) / len(points),
        spread=(min(points), max(points)) if len(points) > 1 else None,
        count=len(points),
        runs=tuple(run for pair in both for run in pair),
    )


_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "source_only": {"marker": "o", "color": style.INK, "markerfacecolor": "white"},
    "dsn": {"marker": "s", "color": style.BLUE},
    "supervised": {"marker": "^", "color": style.GREEN, "markerfacecolor": "white"},
}


def _draw_accuracies(block: Block) -> Figure | None:
    rows = list(block.rows.items())
    if not any(
        our_number(cells.get(_WAYS[way])) is not None for way in _LOOKS for _, cells in rows
    ):
        return None
    figure = style.new_figure(width_in=6.6, height_in=1.4 + 0.36 * len(rows))
    axes = figure.subplots()
    style.tidy(axes)
    for way, look in _LOOKS.items():
        shown = [
            (place, cell.ours)
            for place, (_, cells) in enumerate(rows)
            if (cell := cells.get(_WAYS[way])) is not None and cell.ours is not None
        ]
        for place, ours in shown:
            if ours.spread is not None:
                axes.plot(ours.spread, [place] * 2, color=look["color"], linewidth=2, zorder=2)
        values = [float(ours.value) for _, ours in shown]
        places = [place for place, _ in shown]
        axes.plot(values, places, linestyle="none", label=_WAYS[way].heading, zorder=3, **look)
    axes.set_yticks(range(len(rows)), [label for (label,), _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 102)
    axes.set_xlabel(f"test accuracy (%); {block.title}", fontsize=style.LABEL_PT, color=style.INK)
    axes.legend(fontsize=style.TICK_PT, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


MULTI_DSN = Chapter(
    name="multi_dsn",
    title="Accuracy on target domains without labels",
    about=(
        "Tsaris and Hinkle train Multi-DSN, a domain separation network (Bousmalis et al.) of "
        "many targets, to show memory and time, and print no accuracies. Here it is the test "
        "accuracy on each target of networks that are trained on the labels of one source: by "
        "these alone, by the objective of a domain separation network, which sees images of the "
        "targets, and by that without some of its terms. Beside it is training on a target's own "
        "labels. All have the same network but for its batch norms, and as many steps. Domains "
        "are generated."
    ),
    heads=("target",),
    find=_accuracies,
    citation=CITATION_OF_BIGCONV,
    draw=_draw_accuracies,
)


_WORKERS = (1, 2, 5, 8)
_OVER_TWO = Column(
    key="over_two", heading="over that of a worker of 1 + 1", unit="x", form="{:.3f}", printed=False
)


def _domains_text(ranks: int) -> str:
    return f"1 + {max(ranks, 2) - 1}"


def _memory_command(row: Row) -> tuple[str, ...] | None:
    ranks = row.get("ranks")
    return (f"parallel.devices={ranks}",) if ranks in _WORKERS else None


def _memory(rows: Sequence[Row], commands: Commands) -> list[Block]:
    found = settings_of(rows, commands, _memory_command)
    return [_memory_block(setting, runs, theirs) for setting, (runs, theirs) in found.items()]


def _memory_block(setting: Setting, rows: Sequence[Row], commands: Commands) -> Block:
    by_workers = {each: [row for row in rows if row.get("ranks") == each] for each in _WORKERS}
    shown = [each for each in _WORKERS if by_workers[each] or not (setting.is_partial and rows)]
    cells = [
        cell
        for workers in shown
        for size in sizes_of(rows) or [()]
        for cell in _memory_cells(
            (_domains_text(workers), size_text(size) or "any", str(workers)),
            by_workers[workers],
            by_workers[2] if workers > 1 else (),
            size,
            command=commands.one(f"parallel.devices={workers}"),
        )
    ]
    notes = [note for each in shown for note in notes_of(f"{each} workers", by_workers[each])]
    return Block(
        title=setting.title, cells=tuple(cells), notes=tuple(notes), sweep=commands.sweep()
    )


def _memory_cells(
    label: tuple[str, ...], runs: Sequence[Row], two: Sequence[Row], size: Size, *, command: str
) -> list[Cell]:
    peak, saved = (
        mean_of(runs, values_at(size, key), scale=1e-6) for key in ("peak_bytes", "saved_bytes")
    )
    base = mean_of(two, values_at(size, "peak_bytes"), scale=1e-6)
    return [
        Cell(row=label, column=MEMORY, ours=peak, command=command),
        Cell(row=label, column=_OVER_TWO, ours=ratio_of(peak, base) if peak and base else None),
        Cell(row=label, column=SAVED, ours=saved),
    ]


def _draw_memory(block: Block) -> Figure | None:
    curves: dict[str, list[tuple[str, float]]] = {}
    for (domains, size, workers), cells in block.rows.items():
        if (value := our_number(cells.get(MEMORY))) is not None:
            several = f"{workers} workers" if workers != "1" else "one process"
            curves.setdefault(f"{domains} on {several}", []).append((size, value))
    if not curves:
        return None
    figure = style.new_figure(width_in=7.2, height_in=4.0)
    draw_curves(figure.subplots(), curves)
    figure.suptitle(block.title, fontsize=style.TICK_PT)
    return figure


MULTI_DSN_MEMORY = Chapter(
    name="multi_dsn_memory",
    title="Memory of a worker of one domain (Tsaris and Hinkle, Fig. 7)",
    about=(
        "Tsaris and Hinkle give each domain of Multi-DSN a worker of its own. Their Fig. 7 draws "
        "memory over the size of the input for one source and one target in one process, and for "
        "one source and 1, 4 and 7 targets on a worker each; of the curves we have no figures. "
        "Here it is a training step of one image of each domain, of the rank that needs most: on "
        "processors by torch's own count of what is alive (counted), on GPUs the peak of torch's "
        "allocator (measured). Network and sizes are our choice. More workers than cores are for "
        "their memory only."
    ),
    heads=("domains", "size", "workers"),
    find=_memory,
    citation=CITATION_OF_BIGCONV,
    draw=_draw_memory,
)
