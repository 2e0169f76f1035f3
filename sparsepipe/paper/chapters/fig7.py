"""The paper's Fig. 7: in which layers computing, activations and parameters lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from sparsepipe.paper.chapters.training_settings import USUAL, Setting
from sparsepipe.paper.printed import CITATION, printed
from sparsepipe.plots import style
from sparsepipe.plots.shares import Costs, accumulated_shares_figure
from sparsepipe.report.chapter import Block, Cell, Chapter, Column, Compare, Ours, Printed, Row
from sparsepipe.report.commands import Commands, missing_commands
from sparsepipe.report.dot_plot import wrapped
from sparsepipe.report.measurements import differing
from sparsepipe.report.overrides import of_training, overrides_of, word

_LAYERS = 52
"""Layers of the paper's VGG16; rows end at its poolings."""
_COLUMNS = {
    "layers_compute_s": ("compute", "compute time"),
    "layers_activation_bytes": ("activation", "activation size"),
    "layers_parameter_bytes": ("parameter", "parameter size"),
}
"""Names by the keys of a profile's result with a value for each layer."""
_OF_TITLE = ("data.batch_size", "data.num_points", "data.resolution", "model.width")
"""Keys that the title of a block has, beside the source of its shapes."""
_PAPER = printed("fig7")
_DERIVED = "not printed: computed from the authors' own measurements on a TITAN Xp"
_TITAN = "TITAN Xp, the authors'"


def _blocks(rows: Sequence[Row], commands: Commands) -> list[Block]:
    runs = [
        row
        for row in rows
        if row.get("task_name") == "profile"
        and all(len(row.get(key) or ()) == _LAYERS for key in _COLUMNS)
    ]
    others = [_others(run, commands) for run in runs]
    made_by = [
        commands.giving(*_title_overrides(run, commands), *more)
        for run, more in zip(runs, others, strict=True)
    ]
    missing = missing_commands(commands, made_by)
    return [
        *(
            _block(run, theirs.one(), title=title)
            for run, theirs, title in zip(runs, made_by, _titles(runs, others), strict=True)
        ),
        *(_block(None, theirs.one(), title=title) for title, theirs in missing.items()),
    ]


def _title_overrides(run: Row, commands: Commands) -> tuple[str, ...]:
    """Overrides that give a run's title, but for its further overrides and its device."""
    setting = Setting.of(run)
    root = () if setting.option == USUAL else (f"data.root=${setting.option.upper()}",)
    words = (*setting.overrides, *root)
    return (*words, *commands.unlike(words, {key: run[key] for key in _OF_TITLE if key in run}))


def _others(run: Row, commands: Commands) -> tuple[str, ...]:
    """Overrides of a run beside these."""
    if commands.composed is None:
        return ()
    command = (f"experiment={commands.experiment}", *_title_overrides(run, commands))
    return overrides_of(run, command, commands.composed, _matters)


def _matters(key: str) -> bool:
    of_profile = key.startswith(("backend.", "data.", "model."))
    return of_profile and of_training(key) and key not in _OF_TITLE


def _block(run: Row | None, made_by: str, *, title: str) -> Block:
    return Block(
        title=title,
        cells=tuple(cell for paper in _PAPER for cell in _cells(paper, run, made_by)),
    )


def _titles(runs: Sequence[Row], others: Sequence[Sequence[str]]) -> list[str]:
    """The title of each run, with what distinguishes it from others of the same title."""
    plain = ["; ".join((_title(run), *more)) for run, more in zip(runs, others, strict=True)]
    alike = [
        [run for run, other in zip(runs, plain, strict=True) if other == title] for title in plain
    ]
    return [
        "; ".join((title, *_difference(run, group)))
        for run, title, group in zip(runs, plain, alike, strict=True)
    ]


def _difference(run: Row, alike: Sequence[Row]) -> list[str]:
    """Distinguishes a run from others: settings of its task, its name if these are the same."""
    keys = [key for key in differing(alike) if key.startswith("task.")]
    words = [word(key, run.get(key)) for key in keys]
    same = [each for each in alike if all(each.get(key) == run.get(key) for key in keys)]
    return [*words, f"run {run.get('run_id')}"] if len(same) > 1 else words


def _title(run: Row) -> str:
    setting = Setting.of(run)
    names = [
        f"scale {setting.scale}" if setting.scale else "",
        str(run.get("model._target_", "")).rpartition(".")[2],
        f"width {run['model.width']:g}" if "model.width" in run else "",
        setting.data_text if setting.data else "",
        f"{run.get('data.resolution')}³, batches of {run.get('data.batch_size')}",
        str(run.get("hardware_devices", "")),
        setting.threads_text,
    ]
    return "; ".join(name for name in names if name)


def _cells(paper: Mapping[str, str], run: Row | None, made_by: str) -> Iterator[Cell]:
    last = int(paper["last_layer"])
    for key, (name, heading) in _COLUMNS.items():
        column = Column(
            key=f"{name}_share", heading=heading, unit="%", form="{:.1f}",
            compare=Compare.DIFFERENCE,
        )  # fmt: skip
        text = f"{float(paper[f'{name}_percent']):.1f}"
        yield Cell(
            row=(f"0 to {last}",),
            column=column,
            paper=Printed(text=text, derived=_DERIVED),
            ours=None if run is None else _share(run, key, last),
            command=made_by,
        )


def _share(run: Row, key: str, last: int) -> Ours:
    values = [float(value) for value in run[key]]
    return Ours(value=100 * sum(values[: last + 1]) / (sum(values) or 1.0), runs=(run,))


def _draw(block: Block) -> Figure | None:
    """Our curves, and the authors' at the ends of rows."""
    if not block.runs:
        return None
    (run,) = block.runs
    costs = Costs(
        compute_s=run["layers_compute_s"],
        activation_bytes=run["layers_activation_bytes"],
        parameter_bytes=run["layers_parameter_bytes"],
    )
    figure = accumulated_shares_figure({block.title: costs})
    axes = figure.axes[0]
    axes.set_title(wrapped(block.title, 50), fontsize=style.TICK_PT, color=style.INK)
    places = [int(paper["last_layer"]) for paper in _PAPER]
    look: dict[str, Any] = {
        "linestyle": "none",
        "markeredgecolor": style.INK,
        "markerfacecolor": "white",
    }
    for (name, heading), marker in zip(_COLUMNS.values(), ("o", "s", "^"), strict=True):
        shares = [float(paper[f"{name}_percent"]) for paper in _PAPER]
        label = f"{heading}, {_TITAN}"
        axes.plot(places, shares, marker=marker, zorder=4, clip_on=False, label=label, **look)
    figure.legends[0].remove()
    figure.legend(fontsize=style.TICK_PT, frameon=False, loc="outside lower center", ncols=2)
    return figure


FIG7 = Chapter(
    name="fig7",
    title="Fig. 7: where computing, activations and parameters lie",
    about=(
        "Shares of VGG16's compute time (forward and backward), activation size and parameter "
        "size in its first layers. The paper draws them for a TITAN Xp and prints no figures: "
        "most computing lies in early layers with large activations, most parameters in late "
        "ones. Its column here is computed from the measurements in its authors' repository. "
        "Rows end at the poolings."
    ),
    heads=("layers",),
    find=_blocks,
    citation=CITATION,
    draw=_draw,
)
