"""The report at the end of a sweep: the paper's figures beside all that is there by then."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.errors import SparsePipeError

log = logging.getLogger(__name__)


class SweepReport(Callback):
    """Writes ``report/`` beside the sweep's table, as ``task=report`` does.

    All finished runs of the experiment count, whichever sweep they are of. Of sweeps of anything
    but the paper's tables and figures there is no report.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Makes the report; where that fails, the runs are there all the same."""
        # Every command makes its callbacks: what they need should be read by sweeps alone.
        from sparsepipe.experiment.report_task import chosen_rows, write_chapters
        from sparsepipe.results.report.exhibits import EXHIBITS

        experiment = config.hydra.runtime.choices.get("experiment")
        if experiment not in EXHIBITS:
            return
        given = {"name": str(config.name), "paths": {"outputs": str(config.paths.outputs)}}
        try:
            chosen = chosen_rows(given, exhibits=[experiment])
            write_chapters(Path(str(config.hydra.sweep.dir)) / "report", chosen)
        except SparsePipeError as error:
            log.warning("no report: %s", error)
