"""The table of a sweep's jobs: the overrides in which they differ, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsepipe.runs.best import Mode, best_of, mode_of
from sparsepipe.runs.ledger_table import plan_text
from sparsepipe.sweep.record import Status
from sparsepipe.utils.tables import markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One job of a sweep."""

    overrides: Mapping[str, str]
    run: str | None
    result: Mapping[str, Any]
    status: Status = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The figure by which a row is the best.

    Args:
        key: of ``result.json``.
        mode: None: by the figure's name, see :func:`sparsepipe.runs.best.mode_of`.
    """

    key: str
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class _Figure:
    """A column with a figure of results: its heading, its key, and its text."""

    heading: str
    key: str
    text: Callable[[Any], str]


def _milliseconds(value: float) -> str:
    return f"{1e3 * value:,.1f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


_RATES = ("train_shapes_per_s", "simulated_shapes_per_s", "samples_per_s", "minibatches_per_s")
"""Speeds of training, measured, simulated and emulated; a row shows the first that a result has.

Emulated minibatches have no known size where profiles lack it.
"""
_BEST, _RATIO = "best", "ratio_to_first"
_MINIBATCHES = "epoch_minibatches"
_OWN = (_BEST, "status", "run")
"""Columns of a row that are neither overrides nor figures."""
_UNVALIDATED = (
    "no job is marked as the best: nothing was validated (data.val_share=0.1 validates), and a "
    "test by which one has chosen measures nothing any more"
)

_FIGURES = (
    _Figure("val accuracy", "val/accuracy", _share),
    _Figure("kind", "kind", str),
    _Figure("ranks", "ranks", str),
    _Figure("plan", "plan", str),
    _Figure("train shapes/s", _RATES[0], _rate),
    _Figure("simulated shapes/s", _RATES[1], _rate),
    _Figure("emulated samples/s", _RATES[2], _rate),
    _Figure("minibatches/s", _RATES[3], _rate),
    _Figure("ratio", _RATIO, lambda value: f"{value:.2f}x"),
    _Figure("over DP", "speedup_over_dp", lambda value: f"{value:.2f}x"),
    _Figure("epoch s", "epoch_s", lambda value: f"{value:,.1f}"),
    _Figure("of minibatches", _MINIBATCHES, "{:,}".format),
    _Figure("planned shapes/s", "plan_shapes_per_s", _rate),
    _Figure("bottleneck ms", "bottleneck_s", _milliseconds),
    _Figure("DP ms", "dp_s", _milliseconds),
    _Figure("layers ms", "layers_s", _milliseconds),
    _Figure("step ms", "step_s", _milliseconds),
    _Figure("test shapes/s", "test_shapes_per_s", _rate),
    _Figure("inference shapes/s", "inference_shapes_per_s", _rate),
    _Figure("test accuracy", "test/accuracy", _share),
)
"""Figures of all tasks, those of the test last; a table has those that one of its jobs has."""


def sweep_rows(
    jobs: Sequence[SweepJob], objective: Objective | None = None
) -> list[dict[str, Any]]:
    """A row for each job, with the same keys in all: overrides, figures, status and directory.

    The objective is the first figure, and the row of the best run by it has ``*`` as ``best``, see
    :func:`sparsepipe.runs.best.best_of`.
    Overrides that are the same in all jobs are left out, as are figures that no job has, equal
    numbers of ranks or of an epoch's minibatches, and that figures are measured where all are. A
    ratio is of shapes a second, measured, simulated or emulated, to those of the first job that
    has any of the same kind.

    Args:
        jobs: in their order.
        objective: marks the best row where jobs have it; None marks none.
    """
    names = list(dict.fromkeys(name for job in jobs for name in job.overrides))
    differing = [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]
    shown = _figures_with(objective)
    found = [_figures(job, shown) for job in jobs]
    for rate in _RATES:
        first = next((row[rate] for row in found if row.get(rate)), None)
        for row in found:
            if first and row.get(rate) is not None:
                row[_RATIO] = row[rate] / first
    keys = [figure.key for figure in shown if _is_shown(figure.key, found)]
    marks = _marks(jobs, objective)
    return [
        {
            **{name: job.overrides.get(name, "") for name in differing},
            **({_BEST: mark} if any(marks) else {}),
            **{key: row.get(key) for key in keys},
            "status": job.status,
            "run": job.run or "",
        }
        for job, row, mark in zip(jobs, found, marks, strict=True)
    ]


def sweep_markdown(
    rows: Sequence[Mapping[str, Any]],
    objective: Objective | None = None,
    *,
    width: int | None = None,
) -> str:
    """The rows of :func:`sweep_rows` as a table to read.

    Args:
        rows: of the jobs.
        objective: as :func:`sweep_rows` got it.
        width: in characters. Where the table is wider, runs become their ids and overrides lose the
            groups before their names and digits of their numbers; then columns are left out, those
            of the test first, and never the objective; at last texts of overrides are shortened.
    """
    columns = _columns(rows, objective)
    if width is None or _text_width(columns) <= width:
        return _markdown(columns)
    columns = [_shortened(column, columns) for column in columns]
    for key in [figure.key for figure in reversed(_figures_with(objective))]:
        if _text_width(columns) > width and not _is_kept(key, objective):
            columns = [column for column in columns if column.key != key]
    return _markdown(_narrowed(columns, width))


def best_line(
    jobs: Sequence[SweepJob], texts: Sequence[str], objective: Objective | None
) -> str | None:
    """Names the best job and its run, or why it names none though jobs were tested; None where no
    job has the objective.

    Args:
        jobs: in their order.
        texts: what each job is called.
        objective: as of :func:`sweep_rows`.
    """
    if objective is None:
        is_tested = len(jobs) > 1 and any("test/accuracy" in job.result for job in jobs)
        return _UNVALIDATED if is_tested else None
    mode = _mode(objective)
    places = best_of([job.result for job in jobs], objective.key, mode=mode)
    if not places:
        return None
    place, same = places[0], len(places) - 1
    extreme = "largest" if mode == "max" else "smallest"
    others = f"; {same} more with the same value" if same else ""
    text = _figure_of(objective.key).text(jobs[place].result[objective.key])
    return (
        f"best, by the {extreme} {objective.key} ({text}): {texts[place]}, run {jobs[place].run}"
        f"{others}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    key: str
    heading: str
    cells: tuple[str, ...]
    is_override: bool = False

    @property
    def width(self) -> int:
        return max(3, *map(len, (self.heading, *self.cells)))


def _columns(rows: Sequence[Mapping[str, Any]], objective: Objective | None) -> list[_Column]:
    figures = {figure.key: figure for figure in _figures_with(objective)}
    return [
        _Column(
            key=key,
            heading=figures[key].heading if key in figures else key,
            cells=tuple(_cell(row, key, figures) for row in rows),
            is_override=key not in figures and key not in _OWN,
        )
        for key in rows[0]
        if key != "status"
    ]


def _cell(row: Mapping[str, Any], key: str, figures: Mapping[str, _Figure]) -> str:
    if key == "run" and not row["run"]:
        return str(row["status"])
    value = row[key]
    if value is None:
        return ""
    return figures[key].text(value) if key in figures else str(value)


def _markdown(columns: Sequence[_Column]) -> str:
    rows = list(zip(*(column.cells for column in columns), strict=True))
    return markdown_table([column.heading for column in columns], rows)


def _text_width(columns: Sequence[_Column]) -> int:
    return sum(column.width + 3 for column in columns) + 1


def _is_kept(key: str, objective: Objective | None) -> bool:
    """Whether a figure stays in a narrow table."""
    return key == "val/accuracy" or (objective is not None and key == objective.key)


def _shortened(column: _Column, columns: Sequence[_Column]) -> _Column:
    if column.key == "run":
        return replace(column, cells=tuple(text.rpartition("/")[2] for text in column.cells))
    if not column.is_override:
        return column
    name = column.key.rpartition(".")[2]
    is_unique = sum(other.key.rpartition(".")[2] == name for other in columns) == 1
    cells = tuple(map(_fewer_digits, column.cells))
    tells_apart = len({*cells}) == len({*column.cells})
    return replace(
        column,
        heading=name if is_unique else column.heading,
        cells=cells if tells_apart else column.cells,
    )


def _fewer_digits(text: str) -> str:
    try:
        return min(text, f"{float(text):.4g}", key=len)
    except ValueError:
        return text


def _narrowed(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Takes from the widest override what is too much, as long as something of it is left."""
    found, least = list(columns), 8
    while (over := _text_width(found) - width) > 0:
        widest = max((c for c in found if c.is_override), key=lambda c: c.width, default=None)
        if widest is None or widest.width <= least:
            break
        room = max(least, widest.width - over)
        (heading,) = _cut([widest.heading], room)
        found[found.index(widest)] = replace(
            widest, heading=heading, cells=tuple(_cut(widest.cells, room))
        )
    return found


def _cut(texts: Sequence[str], room: int) -> list[str]:
    """Texts of at most ``room`` characters: without their ends, unless only these differ."""
    without_end = [text if len(text) <= room else f"{text[: room - 1]}…" for text in texts]
    if len({*without_end}) == len({*texts}):
        return without_end
    return [text if len(text) <= room else f"…{text[1 - room :]}" for text in texts]


def _figures_with(objective: Objective | None) -> list[_Figure]:
    """All figures, the objective first."""
    if objective is None:
        return list(_FIGURES)
    first = _figure_of(objective.key)
    return [first, *(figure for figure in _FIGURES if figure.key != first.key)]


def _figure_of(key: str) -> _Figure:
    known = {figure.key: figure for figure in _FIGURES}
    return known.get(key) or _Figure(key, key, "{:.4g}".format)


def _marks(jobs: Sequence[SweepJob], objective: Objective | None) -> list[str]:
    if objective is None:
        return [""] * len(jobs)
    places = best_of([job.result for job in jobs], objective.key, mode=_mode(objective))
    return ["*" if number in places[:1] else "" for number in range(len(jobs))]


def _mode(objective: Objective) -> Mode:
    return objective.mode or mode_of(objective.key)


def _is_shown(key: str, found: Sequence[Mapping[str, Any]]) -> bool:
    values = {row[key] for row in found if key in row}
    if key in ("ranks", _MINIBATCHES):
        return len(values) > 1
    return bool(values) and (key != "kind" or values != {"measured"})


def _figures(job: SweepJob, figures: Sequence[_Figure]) -> dict[str, Any]:
    """The figures of a job's result, with the plan as text and one rate."""
    result = {**job.result, "plan": _plan(job.result)}
    if result.get("kind") == "emulated":
        result[_MINIBATCHES] = result.get("minibatches")
    for rate in [rate for rate in _RATES if result.get(rate) is not None][1:]:
        del result[rate]
    return {
        figure.key: result[figure.key] for figure in figures if result.get(figure.key) is not None
    }


def _plan(result: Mapping[str, Any]) -> str | None:
    config = result.get("plan_config")
    return None if config is None else plan_text(str(config), result.get("plan_cuts") or ())
