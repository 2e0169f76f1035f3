"""The table of a sweep's jobs: the overrides in which they differ, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sparsepipe.runs.best import NONFINITE, Mode, best_of, mode_of
from sparsepipe.runs.ledger_table import plan_text
from sparsepipe.sweep.record import Status
from sparsepipe.utils.files import markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """A job of a sweep; ``run`` is its directory (None: not finished), ``result`` its results."""

    overrides: Mapping[str, str]
    run: str | None
    result: Mapping[str, Any]
    status: Status = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The figure that decides which row is the best.

    Args:
        key: a key of ``result.json``.
        mode: ``max`` or ``min``; None: as :func:`sparsepipe.runs.best.mode_of` chooses.
    """

    key: str
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class _Figure:
    """A column of the table: its heading, the figure's key in results, and its format."""

    heading: str
    key: str
    text: Callable[[Any], str] = str


_RATES = ("train_shapes_per_s", "simulated_shapes_per_s", "samples_per_s", "minibatches_per_s")
"""Keys of training speeds (measured, simulated, emulated); a row shows the first in its result."""
_BEST, _RATIO = "best", "ratio_to_first"
_MINIBATCHES = "epoch_minibatches"
_UNVALIDATED = (
    "no job is marked as the best: nothing was validated (set data.val_share=0.1), and a test that "
    "is used to choose no longer measures anything"
)

_RATE, _SHARE, _RATIO_TEXT, _MS = (
    lambda value: f"{value:,.1f}" if value < 1000 else f"{value:,.0f}",
    "{:.1%}".format,
    "{:.2f}x".format,
    lambda value: f"{1e3 * value:,.1f}",
)
_FIGURES = (
    _Figure("val accuracy", "val/accuracy", _SHARE),
    _Figure("not finite", NONFINITE),
    _Figure("kind", "kind"),
    _Figure("ranks", "ranks"),
    _Figure("plan", "plan"),
    _Figure("train shapes/s", _RATES[0], _RATE),
    _Figure("simulated shapes/s", _RATES[1], _RATE),
    _Figure("emulated samples/s", _RATES[2], _RATE),
    _Figure("minibatches/s", _RATES[3], _RATE),
    _Figure("ratio", _RATIO, _RATIO_TEXT),
    _Figure("over DP", "speedup_over_dp", _RATIO_TEXT),
    _Figure("epoch s", "epoch_s", "{:,.1f}".format),
    _Figure("of minibatches", _MINIBATCHES, "{:,}".format),
    _Figure("planned shapes/s", "plan_shapes_per_s", _RATE),
    _Figure("bottleneck ms", "bottleneck_s", _MS),
    _Figure("DP ms", "dp_s", _MS),
    _Figure("layers ms", "layers_s", _MS),
    _Figure("step ms", "step_s", _MS),
    _Figure("test shapes/s", "test_shapes_per_s", _RATE),
    _Figure("inference shapes/s", "inference_shapes_per_s", _RATE),
    _Figure("test accuracy", "test/accuracy", _SHARE),
)
"""Figures of all tasks, those of tests last; a table shows those that any of its jobs has."""


def sweep_rows(
    jobs: Sequence[SweepJob], objective: Objective | None = None
) -> list[dict[str, Any]]:
    """A row for each job, with the same keys in all: overrides, figures, status and run directory.

    The objective is the first figure, and the best row by it has ``*`` as ``best``
    (:func:`sparsepipe.runs.best.best_of`). Left out are overrides that all jobs share, figures that
    no job has, numbers of ranks or of an epoch's minibatches that all jobs share, and the kind if
    all figures are measured. A ratio is a job's speed over that of the first job with a speed of
    the same kind (measured, simulated or emulated).
    """
    names = list(dict.fromkeys(name for job in jobs for name in job.overrides))
    differing = [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]
    found = []
    for job in jobs:  # its result, with the plan as text and one rate
        result = {**job.result, "plan": None}
        if (config := result.get("plan_config")) is not None:
            result["plan"] = plan_text(str(config), result.get("plan_cuts") or ())
        if result.get("kind") == "emulated":
            result[_MINIBATCHES] = result.get("minibatches")
        for rate in [rate for rate in _RATES if result.get(rate) is not None][1:]:
            del result[rate]
        found.append(result)
    for rate in _RATES:
        first = next((row[rate] for row in found if row.get(rate)), None)
        for row in found:
            if first and row.get(rate) is not None:
                row[_RATIO] = row[rate] / first
    keys = []
    for figure in _figures_with(objective):
        values = {row[figure.key] for row in found if row.get(figure.key) is not None}
        few = figure.key in ("ranks", _MINIBATCHES)
        if len(values) > few and values != {"measured"}:
            keys.append(figure.key)
    best = _best_places(jobs, objective)[:1]
    return [
        {
            **{name: job.overrides.get(name, "") for name in differing},
            **({_BEST: "*" if number in best else ""} if best else {}),
            **{key: row.get(key) for key in keys},
            "status": job.status,
            "run": job.run or "",
        }
        for number, (job, row) in enumerate(zip(jobs, found, strict=True))
    ]


def sweep_markdown(
    rows: Sequence[Mapping[str, Any]],
    objective: Objective | None = None,
    *,
    width: int | None = None,
) -> str:
    """Formats the rows of :func:`sweep_rows` as a Markdown table.

    Args:
        rows: the rows of the jobs.
        objective: as for :func:`sweep_rows`.
        width: limit in characters. A wider table has ids instead of run directories, and overrides
            without the groups of their keys and with fewer digits; then figures are left out, those
            of tests first, but never the objective or the validation accuracy.
    """
    figures = {figure.key: figure for figure in _figures_with(objective)}
    kept = {"val/accuracy", objective.key if objective else ""}
    keys = [key for key in rows[0] if key != "status"]
    head = [figures[key].heading if key in figures else key for key in keys]
    form: dict[str, Callable[[Any], str]] = {key: each.text for key, each in figures.items()}
    named = ({**row, "run": row["run"] or row["status"]} for row in rows)
    cells = [
        ["" if row[key] is None else form.get(key, str)(row[key]) for key in keys] for row in named
    ]
    text = markdown_table(head, cells)
    if width is None or len(text.partition("\n")[0]) <= width:
        return text
    short = [key.rpartition(".")[2] for key in keys]
    head = [
        name if key not in figures and short.count(name) == 1 else long
        for key, name, long in zip(keys, short, head, strict=True)
    ]
    for row in cells:
        for place, key in enumerate(keys):
            if key == "run":
                row[place] = row[place].rpartition("/")[2]
            elif key not in figures:
                with suppress(ValueError):
                    row[place] = min(row[place], f"{float(row[place]):.4g}", key=len)
    for key in [key for key in reversed(figures) if key in keys and key not in kept]:
        text = markdown_table(head, cells)
        if len(text.partition("\n")[0]) <= width:
            break
        place = keys.index(key)
        for line in (keys, head, *cells):
            del line[place]
    return markdown_table(head, cells)


def best_line(
    jobs: Sequence[SweepJob], texts: Sequence[str], objective: Objective | None
) -> str | None:
    """A line about the best job and its run. Without an objective, a line on why no job is marked
    as the best, if jobs were tested. None otherwise. ``texts``: the label of each job.
    """
    if objective is None:
        is_tested = len(jobs) > 1 and any("test/accuracy" in job.result for job in jobs)
        return _UNVALIDATED if is_tested else None
    places = _best_places(jobs, objective)
    if not places:
        return None
    place, same = places[0], len(places) - 1
    extreme = "largest" if (objective.mode or mode_of(objective.key)) == "max" else "smallest"
    others = f"; {same} more with the same value" if same else ""
    text = _figures_with(objective)[0].text(jobs[place].result[objective.key])
    return (
        f"best, by the {extreme} {objective.key} ({text}): {texts[place]}, run {jobs[place].run}"
        f"{others}"
    )


def _figures_with(objective: Objective | None) -> list[_Figure]:
    """All columns of figures, with the objective first."""
    if objective is None:
        return list(_FIGURES)
    known = {figure.key: figure for figure in _FIGURES}
    first = known.pop(objective.key, _Figure(objective.key, objective.key, "{:.4g}".format))
    return [first, *known.values()]


def _best_places(jobs: Sequence[SweepJob], objective: Objective | None) -> list[int]:
    if objective is None:
        return []
    return best_of(
        [job.result for job in jobs], objective.key, mode=objective.mode or mode_of(objective.key)
    )
