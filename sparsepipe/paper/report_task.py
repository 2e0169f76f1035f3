"""The task ``report``: results of finished runs next to what the papers print."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from sparsepipe import __version__
from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import ConfigError, NoRunsError
from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.report.documents import Failures, FilledChapter, write_report
from sparsepipe.report.measurements import plain_rows
from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.ledger_table import Row, rows_of
from sparsepipe.tasks.result import write_result
from sparsepipe.tasks.simulate import in_one_process
from sparsepipe.tasks.task import ResolvedRun, Task
from sparsepipe.utils.files import expanded
from sparsepipe.utils.host import git_commit

log = logging.getLogger(__name__)

ALL = "all"
"""Name of the experiment whose report has all chapters."""
NONE = "default"
"""Name of a run that has neither an experiment nor a ``name=``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportContents:
    """The chapters of a report, and where their runs are.

    Attributes:
        exhibits: names of the tables and figures.
        name: ``name=`` of the runs to read; None: they have the name of their experiment.
        outputs: the directory to which runs are written.
        source: the directory of runs, or the ledger file, from which runs are read.
        scale: only runs of this scale, or without any, count; None: those of all scales.
    """

    exhibits: tuple[str, ...]
    name: str | None
    outputs: str
    source: Path
    scale: str | None

    @classmethod
    def of(
        cls,
        name: str,
        *,
        outputs: str,
        exhibits: Sequence[str] | None = None,
        where: str | None = None,
        scale: str | None = None,
    ) -> Self:
        """Makes the contents from the arguments of ``task=report``; ``name``: that of the run."""
        names = list(exhibits or [name])
        if names == [ALL]:
            names = list(CHAPTERS)
        for each in names:
            if each not in CHAPTERS:
                raise ConfigError(
                    f"no report chapter has the name '{each}'",
                    remedy=f"set experiment={ALL}, or set experiment or task.exhibits to names of: "
                    f"{', '.join(CHAPTERS)}; for runs with another name=, also set task.exhibits, "
                    "such as task.exhibits=[table2]",
                )
        if where is not None and not expanded(where).exists():
            raise ConfigError(
                f"task.where={where} does not exist",
                remedy="give a directory of runs, or a ledger file",
            )
        return cls(
            exhibits=tuple(dict.fromkeys(names)),
            name=None if name in (ALL, NONE, *CHAPTERS) else name,
            outputs=outputs,
            source=expanded(where or outputs),
            scale=scale,
        )

    def rows(self) -> dict[str, list[Row]]:
        """The rows of finished runs, by exhibit; an empty list for an exhibit without runs."""
        found: dict[str, list[Row]] = {}
        for exhibit in self.exhibits:
            try:
                frame = load_results(self.source, experiment=self.name or exhibit)
            except NoRunsError as error:
                log.warning("%s", error.message)
                found[exhibit] = []
                continue
            rows = plain_rows(rows_of(frame))
            scales = (None, self.scale)
            found[exhibit] = [r for r in rows if self.scale is None or r.get("scale") in scales]
        return found


_read: dict[ReportContents, dict[str, list[Row]]] = {}
"""The rows that :meth:`Report.prepare` read, for :meth:`Report.run`: runs are read only once."""


class Report(Task):
    """Writes a report of finished runs next to what the papers print.

    Args:
        exhibits: names of the tables and figures; None: that of the experiment, or all for the
            experiment ``all``.
        where: a directory of runs, or a ledger file; None: ``paths.outputs``.
        scale: only runs of this scale, or without any, count; None: all, in separate tables.
        **of_the_experiment: arguments that the experiment sets for its own task; ignored.
    """

    cores: ClassVar[int | None] = 1
    chooses_devices: ClassVar[bool] = True
    # No data are read and no network is made; the fingerprint of :meth:`prepare` covers the runs.
    not_identity: ClassVar[tuple[str, ...]] = (
        *("backend", "callbacks", "checkpoint", "data", "loss", "model", "optim", "parallel"),
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

    def run(self, run: ResolvedRun) -> None:
        """Writes ``report.html``, ``report.md``, and a CSV and pictures for each exhibit."""
        reported = self._reported(run.spec)
        read = _read.pop(reported, None)
        rows = reported.rows() if read is None else read
        chapters = write_chapters(run.directory.path, reported, rows)
        figures = [block.filled for chapter in chapters for block in chapter.blocks]
        counts = {
            "figures": sum(filled for filled, _ in figures),
            "figures_missing": sum(total - filled for filled, total in figures),
        }
        write_result(run, {"exhibits": list(reported.exhibits), **counts})

    def configured(self, spec: RunSpec, inventory: Inventory) -> RunSpec:
        return in_one_process(spec)

    def prepare(self, run: ResolvedRun) -> str:
        """A fingerprint of the rows, the scale and the version of this package."""
        reported = self._reported(run.spec)
        rows = reported.rows()
        _read.clear()
        _read[reported] = rows
        made_of = [__version__, git_commit(), reported.scale, rows]
        text = json.dumps(made_of, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _reported(self, spec: RunSpec) -> ReportContents:
        return ReportContents.of(
            spec.name,
            outputs=spec.paths.outputs,
            exhibits=self._exhibits,
            where=self._where,
            scale=self._scale,
        )


def write_chapters(
    directory: Path,
    reported: ReportContents,
    rows: Mapping[str, Sequence[Row]],
    *,
    failures: Failures = (),
) -> list[FilledChapter]:
    """Writes a report; logs its path and how many of the values of each table it has."""
    (title, *others) = [CHAPTERS[name].title for name in reported.exhibits]
    given = [] if reported.name is None else [f"name={reported.name}"]
    if reported.outputs != "outputs":
        given.append(f"paths.outputs={reported.outputs}")
    chapters = write_report(
        directory,
        "SparsePipe: the paper's tables and figures" if others else title,
        [(CHAPTERS[name], rows[name]) for name in reported.exhibits],
        given=given,
        failures=failures,
    )
    for chapter in chapters:
        for block in chapter.blocks:
            setting = f" ({block.block.title})" if block.title else ""
            missing = f"; to fill all: {block.sweep}" if block.sweep else ""
            text = "%s%s: %d of %d figures%s"
            log.info(text, chapter.definition.title, setting, *block.filled, missing)
    log.info("page: %s", directory / "report.html")
    return chapters
