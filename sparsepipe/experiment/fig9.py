"""The chart at the end of a sweep of ``experiment=fig9``: the paper's Fig. 9 beside our figures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from sparsepipe.experiment.fig9_jobs import STRATEGIES, Job, Setting
from sparsepipe.experiment.fig9_table import Fig9Table
from sparsepipe.experiment.swept import JobRecord, near, records_of, result_of
from sparsepipe.results.fig9_paper import FIG9
from sparsepipe.results.files import write_text_atomic
from sparsepipe.results.speedups import Bar, Chart, Mark, Panel, speedups
from sparsepipe.results.tables import write_csv

log = logging.getLogger(__name__)


class Fig9(Callback):
    """Writes ``fig9.png``, ``fig9.csv`` and ``fig9.md`` beside the sweep's table.

    A job counts with its run directory, also where the run was finished before: a sweep that
    broke off is given again. What is missing is named.
    """

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Makes the chart, unless no job has anything for it."""
        directory = Path(str(config.hydra.sweep.dir))
        table = Fig9Table.of([_job(record) for record in records_of(directory)])
        if not table.cells:
            log.warning("no job has a figure for the chart of Fig. 9")
            return
        text = table.text()
        log.info("(%s)\n\n%s", near(directory / "fig9.md"), text)
        write_text_atomic(directory / "fig9.md", text)
        write_csv(directory / "fig9.csv", table.rows())
        speedups(chart_of(table), directory / "fig9.png")


def _job(record: JobRecord) -> Job:
    return Job(
        choices=record.choices,
        run=None if record.run is None else near(Path(record.run)),
        result={} if record.run is None else result_of(Path(record.run)),
    )


def chart_of(table: Fig9Table) -> Chart:
    """The figure as it is drawn: a panel for each setting, bars by GPUs and strategy."""
    numbers = sorted({gpus for setting in table.settings for gpus in table.gpus(setting)})
    return Chart(
        groups=[_group(gpus) for gpus in numbers],
        strategies=list(STRATEGIES.values()),
        panels=[_panel(table, setting) for setting in table.settings],
        marks={
            (_group(gpus), STRATEGIES[strategy]): Mark(value=paper.value, derived=paper.derived)
            for (gpus, strategy), paper in FIG9.items()
        },
        bar_label="speedup over DP",
        frame_label="over DP without overlap",
        mark_label="the paper's",
    )


def _panel(table: Fig9Table, setting: Setting) -> Panel:
    bars = {}
    for cell in table.cells.values():
        speedup = table.speedup(cell)
        if cell.setting == setting and cell.strategy in STRATEGIES and speedup is not None:
            place = (_group(cell.gpus), STRATEGIES[cell.strategy])
            bars[place] = Bar(value=speedup, frame=table.speedup_without_overlap(cell))
    return Panel(title=table.title(setting), bars=bars)


def _group(gpus: int) -> str:
    return f"{gpus} GPUs"
