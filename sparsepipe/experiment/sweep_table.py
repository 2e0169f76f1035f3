"""The closing table of a sweep (``sparsepipe -m``): its jobs beside each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.experiment.swept import near, result_of
from sparsepipe.results.files import write_text_atomic
from sparsepipe.results.sweep_table import SweepJob, sweep_markdown, sweep_rows
from sparsepipe.results.tables import write_csv

log = logging.getLogger(__name__)


class SweepTable(Callback):
    """Prints a table of all jobs, and writes ``table.md`` and ``table.csv`` beside them.

    A job counts with its run directory, which the command's function returns: also where the
    run was finished before. Of jobs that have none it is said that they failed.
    """

    def __init__(self) -> None:
        self._jobs: list[tuple[list[str], str | None]] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Notes what the job was and where its run is."""
        done = job_return.status is JobStatus.COMPLETED  # else its value raises
        run = job_return.return_value if done else None
        self._jobs.append((list(job_return.overrides or []), run))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Makes the table, unless every job failed and has told why."""
        if not any(run for _, run in self._jobs):
            return
        rows = sweep_rows([_job(overrides, run) for overrides, run in self._jobs])
        table = sweep_markdown(rows)
        directory = Path(str(config.hydra.sweep.dir))
        failed = sum(row["status"] == "failed" for row in rows)
        log.info(
            "%d jobs%s (%s)\n\n%s\n",
            len(rows),
            f", {failed} of them failed" if failed else "",
            near(directory / "table.md"),
            table,
        )
        write_text_atomic(directory / "table.md", table + "\n")
        write_csv(directory / "table.csv", rows)


def _job(overrides: Sequence[str], run: str | None) -> SweepJob:
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return SweepJob(
        overrides={name: value for name, _, value in pairs},
        run=None if run is None else near(Path(run)),
        result={} if run is None else result_of(Path(run)),
    )
