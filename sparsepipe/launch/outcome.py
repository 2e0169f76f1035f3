"""Logging of a finished run to Weights & Biases: its settings, results, pictures and tables.

They are read from the run's directory, so that any task can be logged, even without a Trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsepipe.config.target import Target
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.collectives import process_group
from sparsepipe.schedule import Plan
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.tracking.loggers import WandbRunLogger, end_tracking, wandb_logger
from sparsepipe.utils.files import read_csv, read_mapping

log = logging.getLogger(__name__)

_MOST_ROWS = 10_000  # of a table that is logged


def log_outcome(run: ResolvedRun) -> None:
    """Logs the configuration and results of a finished run, if ``logger=wandb`` is chosen.

    Each picture in the run's directory is logged as ``figures/<name>``, each table as
    ``tables/<name>``, the test's confusion matrix as ``confusion_matrix``, and the values of
    ``result.json`` that are not settings as the summary.
    """
    if process_group.rank() != 0 or not any(map(_is_tracker, run.spec.logger.values())):
        return
    for logger in run.loggers():
        if not isinstance(logger, WandbRunLogger):
            continue
        logger.log_hyperparams(run.spec.to_dict())
        if run.directory.result.exists():
            settings, result = run.spec.flat(), read_mapping(run.directory.result)
            found = {k: v for k, v in result.items() if k not in settings and v is not None}
            logger.experiment.summary.update(found)
        if media := dict(_media(run.directory)):
            logger.experiment.log(media)
        if logger.upload is not None:
            log.info("logged offline; `%s` uploads it", logger.upload)


def log_report(
    loggers: Mapping[str, Target], directory: Path, *, run_id: str, settings: Mapping[str, Any]
) -> None:
    """Logs pictures and tables of a sweep's report as a separate run if ``logger=wandb`` is set."""
    for target in filter(_is_tracker, loggers.values()):
        logger = target.build_with(run_id=run_id, run_dir=directory, job_type="report")
        try:
            logger.log_hyperparams(dict(settings))
            logger.experiment.log(dict(_media(RunDir(directory))))
        finally:
            end_tracking(failed=False)


def _is_tracker(target: Target) -> bool:
    return target.locate() is wandb_logger


def _media(directory: RunDir) -> Iterator[tuple[str, Any]]:
    import pandas as pd
    import wandb

    def table(frame: pd.DataFrame) -> Any:
        cells = frame.astype(object).where(frame.notna(), None)
        return wandb.Table(
            columns=list(frame.columns), data=cells.to_numpy().tolist(), allow_mixed_types=True
        )

    for path in sorted(directory.path.glob("*.png")):
        yield f"figures/{path.stem}", wandb.Image(str(path))
    for path in sorted(directory.path.glob("*.csv")):
        if path == directory.confusion:
            yield "confusion_matrix", _confusion(path)
        elif path != directory.metrics and path.stat().st_size:
            read = pd.read_csv(path, nrows=_MOST_ROWS, encoding_errors="replace", index_col=False)
            if len(read):
                yield f"tables/{path.stem}", table(read)
    if directory.plan.exists() and not directory.plan_figures.exists():  # made by no search
        stages = enumerate(Plan.load(directory.plan).stages)
        rows = [(number, *stage.layers, ", ".join(stage.devices)) for number, stage in stages]
        frame = pd.DataFrame(rows, columns=["stage", "first", "last", "devices"])
        yield "tables/plan", table(frame)


def _confusion(path: Path) -> Any:
    """Returns the confusion matrix in a CSV file as a Weights & Biases chart."""
    import wandb

    rows = [list(row.values()) for row in read_csv(path, "actual", "predicted")]
    data = [[actual, predicted, int(count)] for actual, predicted, count in rows]
    columns = ["Actual", "Predicted", "nPredictions"]  # those of the service's own chart
    return wandb.plot_table(
        vega_spec_name="wandb/confusion_matrix/v1",
        data_table=wandb.Table(columns=columns, data=data),
        fields={name: name for name in columns},
        string_fields={"title": "Confusion matrix of the test"},
    )
