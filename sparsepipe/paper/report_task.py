"""The task ``report``: ours beside what the paper prints, from the finished runs of experiments."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sparsepipe import __version__
from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.paper.reported import Reported
from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.chapters import Chapter
from sparsepipe.results.report.exhibits import EXHIBITS
from sparsepipe.results.report.failures import Failure
from sparsepipe.results.report.writing import write_report
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.simulate import in_one_process
from sparsepipe.tasks.task import Run, Task
from sparsepipe.utils.host import git_commit

log = logging.getLogger(__name__)

_read: dict[Reported, dict[str, list[Row]]] = {}
"""What a fingerprint was taken of, until its report is made: the runs are read once."""


class Report(Task):
    """Our results beside what the paper prints, from the finished runs of experiments.

    Args:
        exhibits: tables and figures of the paper, by name; None: that of the experiment, or all
            of them for the experiment ``all``.
        where: a directory of runs or a ledger; None: ``paths.outputs``.
        scale: rows of this scale count alone; None: all, each scale apart.
        **of_the_experiment: what the experiment sets for its own task; of no use here.
    """

    cores: ClassVar[int | None] = 1
    chooses_devices: ClassVar[bool] = True
    # No data are read, no network is made; the fingerprint stands for all that counts.
    not_identity: ClassVar[tuple[str, ...]] = (
        *("backend", "callbacks", "checkpoint", "data", "model", "optim", "parallel"),
        *("representation", "seed", "task", "trainer"),
    )

    def __init__(
        self,
        *,
        exhibits: list[str] | None = None,
        where: str | None = None,
        scale: str | None = None,
        **of_the_experiment: Any,
    ) -> None:
        del of_the_experiment
        self._exhibits, self._where, self._scale = exhibits, where, scale

    def run(self, run: Run) -> None:
        """Writes ``report.html``, ``report.md``, and a CSV and pictures for each exhibit.

        Raises:
            ConfigError: nothing of the paper has such a name.
            DataError: finished runs cannot be read, or a file cannot be written.
        """
        run.assert_one_rank()
        reported = self._reported(run.spec)
        read = _read.pop(reported, None)
        rows = reported.rows() if read is None else read
        chapters = write_chapters(run.directory.path, reported, rows)
        figures = [block.filled for chapter in chapters for block in chapter.blocks]
        counts = {
            "figures": sum(filled for filled, _ in figures),
            "figures_missing": sum(wanted - filled for filled, wanted in figures),
        }
        write_result(run, {"exhibits": list(reported.exhibits), **counts})

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        """The task is one process."""
        return in_one_process(spec)

    def prepare(self, spec: RunSpec, inventory: Inventory) -> str:
        """A fingerprint of the rows that count, and of this version: with others, it is another."""
        reported = self._reported(spec)
        rows = reported.rows()
        _read.clear()
        _read[reported] = rows
        made_of = [__version__, git_commit(), reported.scale, rows]
        text = json.dumps(made_of, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _reported(self, spec: RunSpec) -> Reported:
        return Reported.of(
            spec.name,
            outputs=spec.paths.outputs,
            exhibits=self._exhibits,
            where=self._where,
            scale=self._scale,
        )


def write_chapters(
    directory: Path,
    reported: Reported,
    rows: Mapping[str, Sequence[Row]],
    *,
    failures: Sequence[Failure] = (),
) -> list[Chapter]:
    """Writes a report, and logs where it is and what it lacks.

    Args:
        directory: of its files.
        reported: what is asked for.
        rows: finished runs of each exhibit.
        failures: jobs that have left none.

    Raises:
        DataError: a file cannot be written.
    """
    (title, *others) = [EXHIBITS[name].title for name in reported.exhibits]
    chapters = write_report(
        directory,
        "SparsePipe: the paper's tables and figures" if others else title,
        [(EXHIBITS[name], rows[name]) for name in reported.exhibits],
        commands=reported.commands(),
        failures=failures,
    )
    for chapter in chapters:
        for block in chapter.blocks:
            filled, wanted = block.filled
            setting = f" ({block.title})" if block.title else ""
            log.info(
                "%s%s: %d of %d figures%s",
                chapter.exhibit.title,
                setting,
                filled,
                wanted,
                f"; to fill all: {block.sweep}" if filled < wanted and block.sweep else "",
            )
    log.info("page: %s", directory / "report.html")
    return chapters
