"""The task ``compare``: compares existing runs; it is not itself a run with a directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from sparsepipe.config.run_spec import flatten, is_below, read_settings
from sparsepipe.errors import ConfigError, DataError, NoRunsError
from sparsepipe.runs.best import NONFINITE
from sparsepipe.runs.ledger import run_directories
from sparsepipe.runs.ledger_table import ALWAYS, OF_TASKS, ordered
from sparsepipe.runs.metrics import read_rows
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils import reading
from sparsepipe.utils.arguments import is_number
from sparsepipe.utils.files import expanded, markdown_table, read_mapping, write_text_atomic

_MOST = 7
"""Largest number of runs to compare: more curves in one picture would be hard to distinguish."""
_NAMED = 2
"""Largest number of settings in the name of a curve, in addition to the run's label."""
_NOT_COMPARED = ("hydra", "paths", "data.cache_dir", "force")
"""Settings that say where and how a run was started, not what it computes: not compared."""
_NO_MATTER = (
    *("name", "objective", "tags", "scale", "input", "checkpoint_strict"),
    *("task", "logger", "callbacks"),
)
"""Settings that do not affect a training; they name curves only if no other settings differ."""
_OF_ONE_RUN = ("name", "run_id", "started_at", "finished_at")
_OF_THE_MACHINE = (
    *("ranks", "starts", "hardware_hosts", "hardware_memory_bytes"),
    *("machine_cores", "threads_per_rank"),
)
"""Numbers about the machine, which are not results: shown only if runs differ in them."""
_TWICE = ("time/epoch_s", "train/shapes_per_s")
"""Metrics that are left out, as results have them as ``epoch_time_s``, ``train_shapes_per_s``."""
_UNITS = {column.name: column.unit for column in (*ALWAYS, *OF_TASKS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run to compare with others.

    Args:
        label: its name in tables and in the picture.
        directory: its directory.
        settings: the values of its ``config.yaml`` by dotted key.
        result: the content of its ``result.json``; empty if the run is unfinished.
    """

    label: str
    directory: RunDir
    settings: Mapping[str, Any]
    result: Mapping[str, Any]


def compare(
    directories: Sequence[Traversable],
    *,
    width: int,
    runs: list[Any],
    where: str,
    to: str | None = None,
) -> str:
    """Compares settings and results of runs; writes tables and a picture of learning curves.

    Args:
        directories: directories of configurations, which tasks that only print get; not used.
        width: width of the terminal; not used, since tables are not cut to it.
        runs: directories or ids of two to seven runs; unfinished ones have no results yet.
        where: the directory in and below which runs that are named by ids are searched for.
        to: the directory for ``compare.md`` and ``curves.png``; None: ``compare/<ids>`` below
            ``where``.

    Returns:
        The text of ``compare.md``.
    """
    del directories, width
    place = expanded(where)
    if not 2 <= len(runs) <= _MOST:
        raise ConfigError(
            f"a comparison needs 2 to {_MOST} runs, but runs names {len(runs)}",
            remedy=f"name 2 to {_MOST} runs by their directories or ids, such as runs=[A,B]",
        )
    found = [RunDir(_directory_of(str(each), place)) for each in runs]
    if len({run.path for run in found}) < len(found):
        raise ConfigError(
            f"a run is named twice: {', '.join(map(str, runs))}",
            remedy="name different runs, such as runs=[A,B]",
        )
    compared = []
    same = len({run.path.parent.name for run in found}) == 1
    for run in found:
        remedy = "compare other runs, or repeat this one with force=true"
        with reading.explained(run.config, "configuration", error=DataError, remedy=remedy):
            settings = flatten(read_settings(run.config))
        compared.append(
            ComparedRun(
                label=run.run_id if same else f"{run.path.parent.name}/{run.run_id}",
                directory=run,
                settings=settings,
                result=read_mapping(run.result) if run.done.exists() else {},
            )
        )
    ids = "-".join(run.run_id for run in found)
    target = place / "compare" / ids if to is None else expanded(to)
    text = "\n\n".join([*_parts(compared), _curves(compared, target / "curves.png")])
    write_text_atomic(target / "compare.md", text + "\n")
    return text


compare.prints_only = True  # type: ignore[attr-defined]


def _directory_of(named: str, place: Path) -> Path:
    """Finds the directory of a run, named by its path or by its id in or below ``place``."""
    path = expanded(named).absolute()
    if (path / "config.yaml").is_file():
        return path.resolve()
    runs = [] if not place.is_dir() else list(run_directories(place))
    same = [each for each in runs if each.name == named]
    if len(same) == 1:
        return same[0].resolve()
    if same:
        raise ConfigError(
            f"{len(same)} runs have the id {named}: {', '.join(map(str, same))}",
            remedy="name the run by its directory",
        )
    raise ConfigError(
        f"{named} is neither the directory nor the id of a run",
        remedy=f"name a directory with a config.yaml, such as {place / 'NAME' / 'ID'}, or an id of "
        f"a run below {place}",
    )


def _parts(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yields the paragraphs and tables of ``compare.md``, in order, except for the curves."""
    head = ["", *(run.label for run in runs)]
    for run in runs:
        if not run.directory.done.exists():
            epochs = len(read_rows(run.directory.metrics))
            yield f"{run.label} is unfinished ({epochs} epochs so far) and has no results yet"
        if (found := run.result.get(NONFINITE)) is not None:
            yield f"{run.label} has diverged, so it is not to be chosen: {found}"
    if differing := settings_that_differ(runs):
        yield "Where the configurations differ:"
        yield markdown_table(head, differing)
    else:
        yield "The configurations do not differ."
    facts, figures = results_of(runs)
    for title, rows in (("What else differs:", facts), ("Results:", figures)):
        if rows:
            yield title
            yield markdown_table(head, rows)


def settings_that_differ(runs: Sequence[ComparedRun]) -> list[list[str]]:
    """Returns a row for each setting in which runs differ: its key, and its value in each run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [
        [key, *(_text(run.settings[key]) if key in run.settings else "-" for run in runs)]
        for key in keys
        if not is_below(key, _NOT_COMPARED)
        and len({_text(run.settings.get(key)) for run in runs}) > 1
    ]


def results_of(runs: Sequence[ComparedRun]) -> tuple[list[list[str]], list[list[str]]]:
    """Returns rows of the facts in which runs differ, and of all figures, those of tests last.

    A row has a name with its unit, then the runs' values. Facts are texts and numbers about the
    machine. Settings and figures of single classes are left out.
    """
    settings = {key for run in runs for key in run.settings}
    names = [
        name
        for name in ordered(name for run in runs for name in run.result)
        if name not in {*settings, *_OF_ONE_RUN, *_TWICE} and not name.startswith("hydra.")
    ]
    facts, figures = [], []
    for name in sorted(names, key=lambda name: name.startswith(("test", "inference"))):
        values = [run.result.get(name) for run in runs]
        row = [f"{name} ({_UNITS[name]})" if _UNITS.get(name) else name, *map(_cell, values)]
        known = [value for value in values if value is not None]
        if name not in _OF_THE_MACHINE and all(map(is_number, known)):
            if known and name.count("/") < 2:
                figures.append(row)
        elif len({*map(_text, known)}) > 1 and name in _UNITS:
            facts.append(row)
    return facts, figures


def curve_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns each curve's name: the run's label, and up to two settings in which runs differ."""
    differing = [row for row in settings_that_differ(runs) if row[0] != "name"]
    left = [row for row in differing if not is_below(row[0], _NO_MATTER)] or differing
    left.sort(key=lambda row: row[0].endswith("seed"))
    chosen = left[:_NAMED]
    names = []
    for number, run in enumerate(runs, 1):
        values = [f"{row[0].rpartition('.')[2]}={row[number]:.24}" for row in chosen]
        names.append(f"{run.label}: {', '.join(values)}" if values else run.label)
    return names


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not is_number(value):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _curves(runs: Sequence[ComparedRun], picture: Path) -> str:
    """Draws learning curves to ``picture``; returns a line with the path, or why none are drawn."""
    from sparsepipe.plots import curves, style  # matplotlib, which refusals need not wait for

    try:
        rows = [read_rows(run.directory.metrics) for run in runs]
        trained = [any(row.get(curves.TIME) for row in each) for each in rows]
        named = zip(curve_names(runs), rows, trained, strict=True)
        ways = {name: [each] for name, each, has_some in named if has_some}
        style.save_png(curves.comparison_figure(ways), picture)
    except (DataError, NoRunsError) as error:
        return f"No curves: {error.message}"
    others = [
        f"{run.label} ({run.result.get('task_name', 'unfinished')})"
        for run, has_some in zip(runs, trained, strict=True)
        if not has_some
    ]
    without = f"; without {', '.join(others)}, which trained no epoch" if others else ""
    return f"Curves: {picture}{without}"
