"""The ledger at the end of a sweep (``sparsepipe -m``): all finished runs of its experiment."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.experiment.outputs import expanded
from sparsepipe.experiment.swept import near
from sparsepipe.results import gather
from sparsepipe.results.ledger import CSV

log = logging.getLogger(__name__)


class SweepLedger(Callback):
    """Writes ``ledger.parquet`` and ``ledger.csv`` beside the runs of the experiment.

    All its finished runs are in them, those of earlier sweeps and of single commands too. Where
    jobs are of several experiments (``name=a,b``) each has its own, as far as this process has
    run them.
    """

    def __init__(self) -> None:
        self._experiments: set[Path] = set()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Notes in which experiment the job's run is."""
        if job_return.status is JobStatus.COMPLETED and job_return.return_value is not None:
            self._experiments.add(Path(job_return.return_value).parent)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Gathers what there is; what a ledger cannot be made of is told, and ends no sweep."""
        own = (expanded(str(config.paths.outputs)) / str(config.name)).absolute()
        for experiment in sorted({own, *self._experiments}):
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
