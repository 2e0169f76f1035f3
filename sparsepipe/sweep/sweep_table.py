"""The closing table of a sweep (``sparsepipe -m``): its jobs beside each other."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.config.sweep_directory import sweep_directory
from sparsepipe.results.files import write_text_atomic
from sparsepipe.results.sweep_table import SweepJob, sweep_markdown, sweep_rows
from sparsepipe.results.tables import write_csv
from sparsepipe.sweep.record import JobRecord, records_of
from sparsepipe.sweep.swept import near, result_of

log = logging.getLogger(__name__)


class SweepTable(Callback):
    """Prints a table of all jobs, and writes ``table.md`` and ``table.csv`` beside them.

    A job counts with its run directory, which its record in the sweep's directory names: also
    where the run was finished before. Of jobs that have none it is said that they failed.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Makes the table, unless every job failed and has told why."""
        directory = sweep_directory(config)
        jobs = records_of(directory)
        if not any(job.run for job in jobs):
            return
        rows = sweep_rows([_row_of(job) for job in jobs])
        table = sweep_markdown(rows)
        failed = sum(row["status"] == "failed" for row in rows)
        log.info(
            "%s%s (%s)\n\n%s\n",
            "1 job" if len(rows) == 1 else f"{len(rows)} jobs",
            f", {failed} of them failed" if failed else "",
            near(directory / "table.md"),
            table,
        )
        write_text_atomic(directory / "table.md", table + "\n")
        write_csv(directory / "table.csv", rows)


def _row_of(job: JobRecord) -> SweepJob:
    pairs = (override.lstrip("+").partition("=") for override in job.overrides)
    return SweepJob(
        overrides={name: value for name, _, value in pairs},
        run=None if job.run is None else near(Path(job.run)),
        result={} if job.run is None else result_of(Path(job.run)),
        stopped=job.status == "stopped",
    )
