"""The ledger at the end of a sweep (``sparsepipe -m``): all finished runs of its experiment."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.config.outputs import expanded
from sparsepipe.config.sweep_directory import sweep_directory
from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.results import gather
from sparsepipe.results.ledger import CSV
from sparsepipe.sweep.record import records_of
from sparsepipe.sweep.swept import near

log = logging.getLogger(__name__)


class SweepLedger(Callback):
    """Writes ``ledger.parquet`` and ``ledger.csv`` beside the runs of the experiment.

    All its finished runs are in them, those of earlier sweeps and of single commands too. Where
    jobs are of several experiments (``name=a,b``) each has its own.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Gathers what there is; what a ledger cannot be made of is told, and ends no sweep."""
        own = (expanded(str(config.paths.outputs)) / str(config.name)).absolute()
        runs = (Path(job.run) for job in records_of(sweep_directory(config)) if job.run)
        for experiment in sorted({own, *(run.parent for run in runs)}):
            if any(experiment.glob("[!.]*/DONE.json")):
                _gather(experiment)


def _gather(experiment: Path) -> None:
    try:
        frame = gather(experiment)
    except NoRunsError:
        return  # what is finished are reports
    except DataError as error:
        log.warning("no ledger of %s: %s", near(experiment), error)
        return
    runs = "1 finished run" if len(frame) == 1 else f"{len(frame)} finished runs"
    log.info("ledger of %s: %s", runs, near(experiment / CSV))
