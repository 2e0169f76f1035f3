"""The report at the end of a sweep: the paper's figures beside all that is there by then."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from sparsepipe.config.scales import scales_of
from sparsepipe.config.sweep_directory import sweep_directory
from sparsepipe.errors import SparsePipeError
from sparsepipe.sweep.launch import hydra_config
from sparsepipe.sweep.record import records_of
from sparsepipe.sweep.swept import exhibit_of

if TYPE_CHECKING:
    from sparsepipe.results.report.failures import Failure
    from sparsepipe.results.report.wanted import Wanted

log = logging.getLogger(__name__)


class SweepReport(Callback):
    """Writes ``report/`` beside the sweep's table, as ``task=report`` does.

    All finished runs of the experiment count, whichever sweep they are of; of cells at this one's
    scale and with its overrides it tells also where no job has finished. Jobs that did not finish
    are named. Where a tracker is chosen, it gets the report as a run of its own. Of sweeps of
    anything but the paper's tables and figures there is no report.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Makes the report; where that fails, the runs are there all the same."""
        # Every command makes its callbacks: what they need should be read by sweeps alone.
        from sparsepipe.launch.outcome import log_report
        from sparsepipe.paper.report_task import write_chapters
        from sparsepipe.paper.reported import Reported

        experiment = exhibit_of(config)
        if experiment is None:
            return
        sweep = sweep_directory(config)
        try:
            reported = Reported.of(
                str(config.name),
                outputs=str(config.paths.outputs),
                exhibits=[experiment],
                swept=_scales(config),
                wanted=_wanted(experiment, config),
            )
            write_chapters(sweep / "report", reported, reported.rows(), failures=_failures(config))
            log_report(
                _loggers(config),
                sweep / "report",
                run_id=f"{config.name}-report-{sweep.name}",
                settings={"sweep": list(map(str, config.hydra.overrides.task))},
            )
        except SparsePipeError as error:
            log.warning("report of the sweep: %s", error)


def _scales(config: DictConfig) -> list[str]:
    """At which the sweep runs its experiment: as the command line says, or the experiment."""
    params = config.hydra.sweeper.get("params") or {}
    given = [word.lstrip("+").partition("=") for word in config.hydra.overrides.task]
    texts = [params.get("scale"), *(value for name, _, value in given if name == "scale")]
    return scales_of(str(texts[-1]), is_sweep=True) if texts[-1] else []


def _wanted(experiment: str, config: DictConfig) -> list[Wanted]:
    """What none of its jobs has finished of: with which overrides, at which scale.

    Without overrides that the jobs were refused for: no command could have them.
    """
    from sparsepipe.paper.usual_config import is_taken
    from sparsepipe.sweep.sweep_wanted import taken, wanted_of

    params = config.hydra.sweeper.get("params") or {}
    found = wanted_of(records_of(sweep_directory(config)), map(str, params))
    return taken(found, lambda words: is_taken((f"experiment={experiment}", *words)))


def _failures(config: DictConfig) -> list[Failure]:
    """Jobs of the sweep that did not finish, as they are told at its end."""
    from sparsepipe.results.report.failures import Failure

    return [
        Failure(job=f"job {record.number + 1} ({record.text})", error=record.error or record.status)
        for record in records_of(sweep_directory(config))
        if record.status != "finished"
    ]


def _loggers(config: DictConfig) -> dict[str, Any]:
    """Nodes of the trackers that the sweep's jobs have, in whose groups the sweep is named."""
    with hydra_config(config):
        nodes = OmegaConf.to_container(config.logger, resolve=True)
    assert isinstance(nodes, dict)
    return {str(name): node for name, node in nodes.items()}
