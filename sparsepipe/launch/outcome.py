"""Logs settings, results, figures and tables of a finished run to Weights & Biases.

They are read from the run's directory, so that this works for any task, with or without a Trainer.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sparsepipe.config.target import Target
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.tracking.loggers import WandbRunLogger, end_tracking, wandb_logger
from sparsepipe.utils.files import read_mapping
from sparsepipe.utils.tables import read_csv

log = logging.getLogger(__name__)

_MOST_ROWS = 10_000  # of a table there


def log_outcome(run: ResolvedRun) -> None:
    """Logs configuration, result, figures and tables of a run that is done, if a tracker is chosen.

    Every picture of the run's directory is logged as ``figures/<name>``, every table as
    ``tables/<name>``, the counts of the test as ``confusion_matrix``.
    """
    for logger in _trackers(run):
        logger.log_hyperparams(run.spec.to_dict())
        _log_result(logger.experiment, run)
        if media := dict(_media(run.directory)):
            logger.experiment.log(media)
        if logger.upload is not None:
            log.info("logged without a network; `%s` uploads it", logger.upload)


def log_report(
    loggers: Mapping[str, Target], directory: Path, *, run_id: str, settings: Mapping[str, Any]
) -> None:
    """Logs a sweep's report with its files as a run of its own, if a tracker is chosen."""
    for target in loggers.values():
        if not _is_tracker(target):
            continue
        logger = target.build_with(run_id=run_id, run_dir=directory, job_type="report")
        try:
            logger.log_hyperparams(dict(settings))
            logger.experiment.log(dict(_media(RunDir(directory))))
        finally:
            end_tracking(failed=False)


def _is_tracker(target: Target) -> bool:
    return target.locate() is wandb_logger


def _trackers(run: ResolvedRun) -> Iterator[WandbRunLogger]:
    if process_group.rank() == 0 and any(map(_is_tracker, run.spec.logger.values())):
        yield from (logger for logger in run.loggers() if isinstance(logger, WandbRunLogger))


def _log_result(tracked: Any, run: ResolvedRun) -> None:
    """Logs values that are not settings, under the keys of ``result.json``."""
    if not run.directory.result.exists():
        return
    settings = run.spec.flat()
    result = read_mapping(run.directory.result).items()
    found = {k: v for k, v in result if k not in settings and v is not None}
    tracked.summary.update(found)


def _media(directory: RunDir) -> Iterator[tuple[str, Any]]:
    import wandb

    for path in sorted(directory.path.glob("*.png")):
        yield f"figures/{path.stem}", wandb.Image(str(path))
    for path in sorted(directory.path.glob("*.csv")):
        if path == directory.confusion:
            yield "confusion_matrix", _confusion(path)
        elif path != directory.metrics and (rows := _rows(path)):
            yield f"tables/{path.stem}", _table(rows)
    if directory.plan.exists() and not directory.plan_figures.exists():
        yield "tables/plan", _table(_stages(directory.plan))


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        found = islice(csv.DictReader(stream, restkey=""), _MOST_ROWS)
        return [{name: _cell(text) for name, text in row.items() if name} for row in found]


def _cell(text: str | None) -> float | str | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    columns = list(rows[0]) if rows else []
    cells = [[row.get(name) for name in columns] for row in rows[:_MOST_ROWS]]
    return wandb.Table(columns=columns, data=cells, allow_mixed_types=True)


def _confusion(path: Path) -> Any:
    """Weights & Biases' chart of labels and predictions."""
    import wandb

    rows = read_csv(path, "actual", "predicted", "shapes")
    names = list(dict.fromkeys(row["actual"] for row in rows))
    number = {name: place for place, name in enumerate(names)}
    pairs = [
        (number[row["actual"]], number[row["predicted"]])
        for row in rows
        for _ in range(int(row["shapes"]))
    ]
    return wandb.plot.confusion_matrix(
        y_true=[actual for actual, _ in pairs],
        preds=[predicted for _, predicted in pairs],
        class_names=names,
        title="Confusion matrix of the test",
    )


def _stages(path: Path) -> list[dict[str, Any]]:
    """The stages of a plan that was not searched for, so that there are no figures."""
    plan = Plan.load(path)
    return [
        {
            "stage": number,
            "first": stage.layers[0],
            "last": stage.layers[1],
            "devices": ", ".join(stage.devices),
        }
        for number, stage in enumerate(plan.stages)
    ]
