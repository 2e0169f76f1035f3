"""The report at the end of a sweep: the paper's figures beside all that is there by then."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from sparsepipe.config.scales import scales_of
from sparsepipe.config.sweep_environment import given_overrides, sweep_directory
from sparsepipe.config.target import Target
from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.report.commands import Request
from sparsepipe.sweep.composition import hydra_config
from sparsepipe.sweep.record import JobRecord, own_texts, records_of

if TYPE_CHECKING:
    from sparsepipe.report.documents import Failure


log = logging.getLogger(__name__)
_REPORT = "report"
"""Directory of the report below that of the sweep."""
_MOST = 8
"""With more requests, as in a search, a report would consist of gaps."""
_OF_NO_FIGURE = (
    *("checkpoint", "experiment", "force", "hydra", "logger", "name", "objective", "paths"),
    "tags",
)
"""Keys and groups that commands have otherwise, or that change nothing in a table."""
_OF_CELLS = {
    "": ("parallel", "parallel.devices", "parallel.num_nodes", "parallel.strategy", "task"),
    "paper/network": ("data.point_ratio", "data.representation", "model", "representation"),
}
"""Keys and groups that say of which cell a run is; some do where an experiment sweeps a group."""
_CHOOSING_STRATEGY = frozenset({"paper/schedule", "paper/trial"})
"""Groups whose options differ in strategy, so that only some cells take a key of it."""


def requests_of(records: Sequence[JobRecord], swept: Iterable[str]) -> list[Request]:
    """Runs whose missing cells the report lists, by the scale and the overrides of jobs.

    Returns:
        None of them where any of their jobs has finished, since its run has a table, nor of jobs
        that were refused. Nothing where there are too many.
    """
    own = {name.lstrip("+") for name in swept}
    jobs: dict[Request, list[JobRecord]] = {}
    for record in records:
        if record.exit_code == ConfigError.exit_code:
            continue  # refused, as any command with these overrides would be
        jobs.setdefault(_request_of_job(record.overrides, own), []).append(record)
    found = [
        replace(request, seeds=_seeds(theirs))
        for request, theirs in jobs.items()
        if all(each.run is None for each in theirs)
    ]
    return found if len(found) <= _MOST else []


def _request_of_job(overrides: Iterable[str], swept: Collection[str]) -> Request:
    scale, kept, of_task, is_of_cells = None, [], [], True
    sweeps_strategies = not _CHOOSING_STRATEGY.isdisjoint(swept)
    for word in (each.lstrip("+") for each in overrides):
        name, _, value = word.lstrip("~").partition("=")
        first = re.split(r"[./@]", name)[0]
        if name == "scale":
            scale = value
        elif name in (*swept, "seed") or first in _OF_NO_FIGURE:
            continue
        elif _is_of_cell(name, swept):
            is_of_cells = False
        elif first == "task" and sweeps_strategies:
            of_task.append(word)
        elif first != "parallel" or not sweeps_strategies:  # else only some cells could take it
            kept.append(word)
    overriding = tuple(kept) if kept or is_of_cells else None
    return Request(scale=scale, overrides=overriding, of_task=tuple(of_task))


def _is_of_cell(name: str, swept: Collection[str]) -> bool:
    cells = [
        key for group, keys in _OF_CELLS.items() if not group or group in swept for key in keys
    ]
    is_of_swept_task = name.startswith("task.") and "task" in swept
    of_strategy = name.startswith("parallel.strategy.") and _CHOOSING_STRATEGY.isdisjoint(swept)
    return name in cells or is_of_swept_task or of_strategy


def _seeds(records: Sequence[JobRecord]) -> str:
    """The seeds of jobs as one override; empty without any."""
    words = (each.lstrip("+").partition("=") for record in records for each in record.overrides)
    found = dict.fromkeys(value for name, _, value in words if name == "seed")
    return f"seed={','.join(found)}" if found else ""


class SweepReport(Callback):
    """Writes ``report/`` beside the sweep's table, as ``task=report`` does.

    It is made of all finished runs of the experiment, whichever sweep they are of. Of cells at this
    sweep's scale and with its overrides it lists also those of which no job has finished, and it
    names the jobs that did not finish. A tracker gets the report as a run of its own. A sweep of an
    experiment that no chapter is about has no report.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Writes the report; a failure is a warning."""
        experiment, sweep = _chapter_of(config), sweep_directory(config)
        if experiment is None:
            return
        # Torch, which a misspelt key need not wait for; and every command makes its callbacks.
        from sparsepipe.launch.outcome import log_report
        from sparsepipe.paper.report_task import ReportContents, write_chapters

        try:
            reported = ReportContents.of(
                str(config.name),
                outputs=str(config.paths.outputs),
                exhibits=[experiment],
                swept=_scales(config),
                requests=requests_of(
                    records_of(sweep), map(str, config.hydra.sweeper.get("params") or {})
                ),
            )
            write_chapters(sweep / _REPORT, reported, reported.rows(), failures=_failures(config))
            log_report(
                _loggers(config),
                sweep / _REPORT,
                run_id=f"{config.name}-report-{sweep.name}",
                settings={"sweep": given_overrides(config)},
            )
        except SparsePipeError as error:
            log.warning("report of the sweep: %s", error)


def _scales(config: DictConfig) -> list[str]:
    """The scales of the sweep, from the command line or the experiment."""
    params = config.hydra.sweeper.get("params") or {}
    given = [word.lstrip("+").partition("=") for word in given_overrides(config)]
    texts = [params.get("scale"), *(value for name, _, value in given if name == "scale")]
    return scales_of(str(texts[-1]), is_sweep=True) if texts[-1] else []


def _failures(config: DictConfig) -> list[Failure]:
    """Unfinished jobs of the sweep, with their errors."""
    from sparsepipe.report.documents import Failure

    records = records_of(sweep_directory(config))
    texts = own_texts([record.overrides for record in records], given=given_overrides(config))
    return [
        Failure(job=f"job {record.number + 1} ({text})", error=record.error or record.status)
        for record, text in zip(records, texts, strict=True)
        if record.status != "finished"
    ]


def _loggers(config: DictConfig) -> dict[str, Target]:
    """Trackers of the sweep's jobs, whose groups are named after the sweep."""
    with hydra_config(config):
        nodes = OmegaConf.to_container(config.logger, resolve=True)
    assert isinstance(nodes, dict)
    return {str(name): Target.parse(node) for name, node in nodes.items()}


def _chapter_of(config: DictConfig) -> str | None:
    """The sweep's experiment, if a chapter of reports has its name."""
    from sparsepipe.paper.chapters import CHAPTERS

    experiment = OmegaConf.select(config, "hydra.runtime.choices.experiment")
    return str(experiment) if experiment is not None and experiment in CHAPTERS else None
