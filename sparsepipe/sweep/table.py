"""The table of a sweep's jobs: the overrides in which they differ, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsepipe.runs.ledger_table import plan_text
from sparsepipe.utils.tables import markdown_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One job of a sweep."""

    overrides: Mapping[str, str]
    run: str | None
    result: Mapping[str, Any]
    stopped: bool = False

    @property
    def status(self) -> str:
        if self.run is not None:
            return "finished"
        return "stopped" if self.stopped else "failed"


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


_RATES = ("train_shapes_per_s", "simulated_shapes_per_s", "samples_per_s", "minibatches_per_s")
"""Speeds of training, measured, simulated and emulated; a row shows the first that a result has.

Emulated minibatches have no known size where profiles lack it.
"""
_RATIO = "ratio_to_first"
_MINIBATCHES = "epoch_minibatches"

_FIGURES = (
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
    _Figure("test shapes/s", "test_shapes_per_s", _rate),
    _Figure("inference shapes/s", "inference_shapes_per_s", _rate),
    _Figure("test accuracy", "test/accuracy", lambda value: f"{value:.1%}"),
    _Figure("bottleneck ms", "bottleneck_s", _milliseconds),
    _Figure("DP ms", "dp_s", _milliseconds),
    _Figure("layers ms", "layers_s", _milliseconds),
    _Figure("step ms", "step_s", _milliseconds),
)
"""Figures of all tasks; a table has those that one of its jobs has."""


def sweep_rows(jobs: Sequence[SweepJob]) -> list[dict[str, Any]]:
    """A row for each job, with the same keys in all: overrides, figures, status and directory.

    Overrides that are the same in all jobs are left out, as are figures that no job has, equal
    numbers of ranks or of an epoch's minibatches, and that figures are measured where all are. A
    ratio is of shapes a second, measured, simulated or emulated, to those of the first job that
    has any of the same kind.
    """
    names = list(dict.fromkeys(name for job in jobs for name in job.overrides))
    differing = [name for name in names if len({job.overrides.get(name) for job in jobs}) > 1]
    found = [_figures(job) for job in jobs]
    for rate in _RATES:
        first = next((row[rate] for row in found if row.get(rate)), None)
        for row in found:
            if first and row.get(rate) is not None:
                row[_RATIO] = row[rate] / first
    keys = [figure.key for figure in _FIGURES if _is_shown(figure.key, found)]
    return [
        {
            **{name: job.overrides.get(name, "") for name in differing},
            **{key: row.get(key) for key in keys},
            "status": job.status,
            "run": job.run or "",
        }
        for job, row in zip(jobs, found, strict=True)
    ]


def sweep_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of :func:`sweep_rows` as a table to read."""
    figures = {figure.key: figure for figure in _FIGURES}
    shown = [key for key in rows[0] if key != "status"]
    head = [figures[key].heading if key in figures else key for key in shown]
    return markdown_table(head, [[_cell(row, key, figures) for key in shown] for row in rows])


def _cell(row: Mapping[str, Any], key: str, figures: Mapping[str, _Figure]) -> str:
    if key == "run" and not row["run"]:
        return str(row["status"])
    value = row[key]
    if value is None:
        return ""
    return figures[key].text(value) if key in figures else str(value)


def _is_shown(key: str, found: Sequence[Mapping[str, Any]]) -> bool:
    values = {row[key] for row in found if key in row}
    if key in ("ranks", _MINIBATCHES):
        return len(values) > 1
    return bool(values) and (key != "kind" or values != {"measured"})


def _figures(job: SweepJob) -> dict[str, Any]:
    """The figures of a job's result, with the plan as text and one rate."""
    result = {**job.result, "plan": _plan(job.result)}
    if result.get("kind") == "emulated":
        result[_MINIBATCHES] = result.get("minibatches")
    for rate in [rate for rate in _RATES if result.get(rate) is not None][1:]:
        del result[rate]
    return {
        figure.key: result[figure.key] for figure in _FIGURES if result.get(figure.key) is not None
    }


def _plan(result: Mapping[str, Any]) -> str | None:
    config = result.get("plan_config")
    return None if config is None else plan_text(str(config), result.get("plan_cuts") or ())
