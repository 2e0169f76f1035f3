"""Several domains: accuracy on targets without labels, and memory of a worker with one domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.measured_steps import (
    MEMORY,
    SAVED,
    draw_curves,
    sets_apart,
    size_text,
    sizes_of,
    tables_of_steps,
    values_at,
)
from sparsepipe.paper.printed import CITATION_OF_BIGCONV
from sparsepipe.plots import style
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Ours
from sparsepipe.report.measurements import mean_of, ratio_of, unlike_notes
from sparsepipe.runs.ledger_table import Row

_TARGETS: Mapping[str, tuple[str, ...]] = {
    "digit_domains": (
        *("blended", "inverted", "noisy", "blurred", "thick", "slanted", "low_resolution"),
        "coloured",
    ),
    "shape_domains": ("partial", "noisy", "occluded", "density", "rotated"),
}
"""Target domains by option of ``paper/network``."""
_MEAN = "mean of the targets"
_METHODS = {
    method: Column(key=method, heading=heading, unit="%", form="{:.1f}", printed=False)
    for method, heading in {
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
"""Columns by value of ``paper.training``."""
_GAIN = Column(
    key="gain", heading="DSN over source only", unit="points", form="{:+.1f}", printed=False
)
_SWEPT = {"digit_domains": tuple(_METHODS), "shape_domains": ("source_only", "dsn")}
"""Methods that the commands of the experiment train, by option of ``paper/network``."""
_OF_ACCURACIES = ("paper/network", "paper.training", "data.source")


def _accuracies(rows: Sequence[Row]) -> list[Block]:
    blocks = []
    for title, scale, table in tables_of_steps(rows, _OF_ACCURACIES, task="train"):
        for network, targets in _TARGETS.items():
            runs = [row for row in table if row["study.cell.network"] == network]
            if not table or runs:
                block = _accuracy_block(runs, targets, _SWEPT[network] if scale != "smoke" else ())
                chosen = f"paper/network={network}"
                overrides = [f"{chosen} paper.training=source_only,dsn"]
                if network == "digit_domains":
                    overrides = [chosen]
                    if scale != "smoke":
                        labels = f"data.source={','.join(targets)}"
                        overrides.append(f"{chosen} paper.training=supervised {labels}")
                name = f"{title}; {network.replace('_', ' ')}"
                blocks.append(replace(block, title=name, overrides=tuple(overrides)))
    return blocks


def _accuracy_block(rows: Sequence[Row], targets: Sequence[str], swept: Sequence[str]) -> Block:
    by_method = {
        method: [row for row in rows if row["study.cell.training"] == method] for method in _METHODS
    }
    methods = [method for method, runs in by_method.items() if runs or method in swept]
    cells: list[Cell] = []
    for target in (*targets, _MEAN):
        key = "test/target_accuracy" if target == _MEAN else f"test/{target}/accuracy"
        for method in methods:
            runs = by_method[method]
            if method == "supervised":  # runs that had the labels of this target
                ours = _supervised(runs, targets if target == _MEAN else (target,))
            else:
                ours = mean_of(runs, key, scale=100)
            cells.append(Cell(row=(target,), column=_METHODS[method], ours=ours))
        gain = _gain(by_method, key)
        cells.append(Cell(row=(target,), column=_GAIN, ours=gain, expected=False))
    notes = [
        f"{_METHODS[method].heading}: {note}"
        for method in methods
        if method != "supervised"
        for note in unlike_notes(by_method[method], sets_apart)
    ]
    return Block(cells=tuple(cells), notes=tuple(notes))


def _supervised(runs: Sequence[Row], targets: Sequence[str]) -> Ours | None:
    """Mean over targets of the accuracy of runs with the target's labels; None: one has no run."""
    found = []
    for target in targets:
        own = [row for row in runs if row.get("study.cell.labels") == target]
        found.append(mean_of(own, f"test/{target}/accuracy", scale=100))
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    if len(known) == 1:
        return known[0]
    total = sum(float(each.value) for each in known)
    return Ours(value=total / len(known), runs=tuple(run for each in known for run in each.runs))


def _gain(by_method: Mapping[str, Sequence[Row]], key: str) -> Ours | None:
    """Mean percentage points, over the seeds of both, by which DSN exceeds source-only training."""
    alone = {row.get("seed"): row for row in by_method["source_only"] if key in row}
    both = [(row, alone[row.get("seed")]) for row in by_method["dsn"] if row.get("seed") in alone]
    points = [100 * (float(own[key]) - float(base[key])) for own, base in both if key in own]
    if not points:
        return None
    return Ours(
        value=sum(points) / len(points),
        spread=(min(points), max(points)) if len(points) > 1 else None,
        count=len(points),
        runs=tuple(run for pair in both for run in pair),
    )


MULTI_DSN = Chapter(
    name="multi_dsn",
    title="Accuracy on target domains without labels",
    about=(
        "Tsaris and Hinkle train Multi-DSN, a domain separation network (Bousmalis et al.) with "
        "many targets, to show memory and time, but print no accuracies. Ours are test accuracies "
        "on each target of networks trained with the labels of one source: with these alone, with "
        "the objective of a domain separation network, which sees images of the targets, and with "
        "that without some of its terms; in addition, with the target's own labels. Except for "
        "batch norms, all have the same network and number of steps. Domains are generated."
    ),
    heads=("target",),
    find=_accuracies,
    citation=CITATION_OF_BIGCONV,
    pictured=("source_only", "dsn", "supervised"),
)


_WORKERS = (1, 2, 5, 8)
_OVER_TWO = Column(
    key="over_two", heading="over that of a worker of 1 + 1", unit="x", form="{:.3f}", printed=False
)
_OF_MEMORY = ("parallel.devices",)


def _memory(rows: Sequence[Row]) -> list[Block]:
    blocks = []
    for title, scale, table in tables_of_steps(rows, _OF_MEMORY):
        cells: list[Cell] = []
        notes: list[str] = []
        by_workers = {
            workers: [row for row in table if row["study.cell.workers"] == workers]
            for workers in _WORKERS
        }
        for workers, runs in by_workers.items():
            if scale == "smoke" and table and not runs:  # this scale sweeps only some
                continue
            notes += [f"{workers} workers: {note}" for note in unlike_notes(runs, sets_apart)]
            two = by_workers[2] if workers > 1 else ()
            for size in sizes_of(table) or [()]:
                domains = f"1 + {max(workers, 2) - 1}"
                label = (domains, size_text(size) or "any", str(workers))
                peak = mean_of(runs, values_at(size, "peak_bytes"), scale=1e-6)
                saved = mean_of(runs, values_at(size, "saved_bytes"), scale=1e-6)
                base = mean_of(two, values_at(size, "peak_bytes"), scale=1e-6)
                over_two = ratio_of(peak, base)
                cells.append(Cell(row=label, column=MEMORY, ours=peak))
                cells.append(Cell(row=label, column=_OVER_TWO, ours=over_two, expected=False))
                cells.append(Cell(row=label, column=SAVED, ours=saved, expected=False))
        blocks.append(Block(title=title, cells=tuple(cells), notes=tuple(notes)))
    return blocks


def _draw_memory(block: Block) -> Figure | None:
    curves: dict[str, list[tuple[str, float]]] = {}
    for (domains, size, workers), cells in block.rows.items():
        if (value := cells[MEMORY].number) is not None:
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
        "one source and 1, 4 and 7 targets on a worker each; the values of the curves are not "
        "printed. Ours is the memory of a training step on one image of each domain, on the rank "
        "that needs most: on CPUs the bytes of live tensors (counted), on GPUs the peak of torch's "
        "allocator (measured). Network and sizes are our choice. Time is not shown, so that "
        "workers may outnumber cores."
    ),
    heads=("domains", "size", "workers"),
    find=_memory,
    citation=CITATION_OF_BIGCONV,
    draw=_draw_memory,
)
