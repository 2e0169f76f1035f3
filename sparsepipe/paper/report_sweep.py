"""The report at the end of a sweep: the paper's figures next to those of all finished runs."""

from __future__ import annotations

import logging
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from sparsepipe.config.sweep_environment import given_overrides, sweep_directory
from sparsepipe.config.target import Target
from sparsepipe.errors import SparsePipeError
from sparsepipe.sweep.composition import hydra_config
from sparsepipe.sweep.record import own_texts, records_of

log = logging.getLogger(__name__)


class SweepReport(Callback):
    """Writes the directory ``report`` next to the sweep's table, as ``task=report`` does.

    The report shows all finished runs of the experiment, also those of other sweeps, and names the
    jobs of this sweep that did not finish. Experiment trackers log the report as a separate run. An
    experiment without a chapter has no report.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Writes the report; if that fails, only logs a warning."""
        # These import torch; every command makes its callbacks, even one with a misspelt key.
        from sparsepipe.launch.outcome import log_report
        from sparsepipe.paper.chapters import CHAPTERS
        from sparsepipe.paper.report_task import ReportContents, write_chapters

        experiment = OmegaConf.select(config, "hydra.runtime.choices.experiment")
        if experiment not in CHAPTERS:
            return
        sweep, given = sweep_directory(config), given_overrides(config)
        records = records_of(sweep)
        texts = own_texts([record.overrides for record in records], given=given)
        failures = [
            (f"job {record.number + 1} ({text})", record.error or record.status)
            for record, text in zip(records, texts, strict=True)
            if record.status != "finished"
        ]
        with hydra_config(config):
            nodes = OmegaConf.to_container(config.logger, resolve=True)
        assert isinstance(nodes, dict)
        loggers = {str(name): Target.parse(node) for name, node in nodes.items()}
        name = str(config.name)
        try:
            outputs = str(config.paths.outputs)
            contents = ReportContents.of(name, outputs=outputs, exhibits=[str(experiment)])
            write_chapters(sweep / "report", contents, contents.rows(), failures=failures)
            log_report(
                loggers,
                sweep / "report",
                run_id=f"{name}-report-{sweep.name}",
                settings={"sweep": given},
            )
        except SparsePipeError as error:
            log.warning("the sweep has no report: %s", error)
