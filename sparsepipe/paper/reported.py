"""What a report is made of: which exhibits, and the finished runs of each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sparsepipe.config.check import suggest
from sparsepipe.config.outputs import expanded
from sparsepipe.errors import ConfigError, NoRunsError
from sparsepipe.paper.usual_config import usual
from sparsepipe.results import load_results
from sparsepipe.results.cells import rows_of
from sparsepipe.results.report.cell import Row
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.exhibits import EXHIBITS
from sparsepipe.results.report.rows import plain_rows
from sparsepipe.results.report.wanted import Wanted

log = logging.getLogger(__name__)

ALL = "all"
"""The experiment of all."""
NONE = "default"
"""The name without an experiment."""
_OUTPUTS = "paths.outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What a report is asked for.

    Attributes:
        exhibits: tables and figures of the paper, by name.
        name: that runs were given in place of their experiment's own; None: none.
        outputs: the directory that runs are written to.
        source: a directory of runs or a ledger.
        scale: rows of this scale count alone; None: all.
        scales: whose cells are told of even where no run has one of them.
        wanted: likewise, at a scale and with overrides.
    """

    exhibits: tuple[str, ...]
    name: str | None
    outputs: str
    source: Path
    scale: str | None
    scales: tuple[str, ...] = ()
    wanted: tuple[Wanted, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        *,
        outputs: str,
        exhibits: Sequence[str] | None = None,
        where: str | None = None,
        scale: str | None = None,
        swept: Sequence[str] = (),
        wanted: Sequence[Wanted] = (),
    ) -> Self:
        """By a configuration and the arguments of ``task=report``.

        Args:
            name: of the experiment.
            outputs: directory of all runs.
            exhibits: see ``task=report``.
            where: likewise.
            scale: likewise.
            swept: scales of a sweep, of whose cells is told; rows of others count all the same.
            wanted: what else it was asked for and has no finished run of; likewise.

        Raises:
            ConfigError: nothing of the paper has such a name.
        """
        names = _names(name, exhibits)
        given = name not in (ALL, NONE, *EXHIBITS)
        return cls(
            exhibits=tuple(names),
            name=name if given else None,
            outputs=outputs,
            source=expanded(where or outputs),
            scale=scale,
            scales=tuple(swept) if scale is None else (scale,),
            wanted=tuple(wanted),
        )

    def rows(self) -> dict[str, list[Row]]:
        """The finished runs of each exhibit.

        Raises:
            DataError: there are some, and they cannot be read.
        """
        return {exhibit: self._rows(self.name or exhibit) for exhibit in self.exhibits}

    def commands(self) -> dict[str, Commands]:
        """What makes the commands that fill the cells of each exhibit."""
        is_usual = usual((), (_OUTPUTS,)).get(_OUTPUTS) == self.outputs
        return {
            exhibit: Commands(
                experiment=exhibit,
                name=self.name,
                outputs=None if is_usual else self.outputs,
                scales=self.scales,
                wanted=self.wanted,
                usual=usual,
            )
            for exhibit in self.exhibits
        }

    def _rows(self, experiment: str) -> list[Row]:
        """Of an experiment; none where it has none, which is no reason not to tell of gaps."""
        try:
            frame = load_results(self.source, experiment=experiment)
        except NoRunsError as error:
            log.warning("%s", error.message)
            return []
        rows = plain_rows(rows_of(frame))
        return [row for row in rows if self.scale is None or row.get("scale") in (None, self.scale)]


def _names(name: str, exhibits: Sequence[str] | None) -> list[str]:
    asked = list(exhibits or [name])
    if asked == [ALL]:
        return list(EXHIBITS)
    for each in asked:
        if each not in EXHIBITS:
            raise ConfigError(
                f"the paper has no table or figure '{each}' to report on{suggest(each, EXHIBITS)}",
                remedy=f"choose experiment={ALL}, or experiment= or task.exhibits= of: "
                f"{', '.join(EXHIBITS)}; of runs with a name= of their own say with task.exhibits= "
                "what they are of, such as task.exhibits=[table2]",
            )
    return list(dict.fromkeys(asked))
