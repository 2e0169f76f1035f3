"""The best of several finished runs, judged by one number in their results, called a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparsepipe.errors import ConfigError
from sparsepipe.runs.ledger import load_results, run_directories
from sparsepipe.runs.ledger_table import rows_of
from sparsepipe.utils.arguments import checked, is_number
from sparsepipe.utils.extensions import nearest
from sparsepipe.utils.files import PathLike, expanded

Mode = Literal["max", "min"]
VALIDATION = "val/accuracy"
"""The figure, a column of the ledger, by which runs are compared if no other is named."""
NONFINITE = "nonfinite"
"""Key of results and checkpoints of trainings that went on although loss or weights were no longer
finite (``trainer.nonfinite=warn``): what was not, and when. Such runs are never the best."""
_SMALLER = re.compile(r"loss|error|bubble|bytes|(?<!_per)_s(/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRun:
    """The best of several runs.

    Attributes:
        value: the run's value of the figure by which runs were compared.
        directory: the run's directory; None if the searched directory does not contain it, as with
            a ledger that was moved.
        checkpoint: the run's best checkpoint, else its last one; None if neither was kept.
        result: the run's row of the ledger, as values by column.
        same: number of other runs with the same value.
    """

    value: float
    directory: Path | None
    checkpoint: Path | None
    result: Mapping[str, Any] = field(repr=False)
    same: int = 0


def mode_of(key: str) -> Mode:
    """``max`` if the largest value of a figure is the best, else ``min``, judged by its name.

    Losses, errors, times, bytes and bubbles are best when small, all other figures when large.
    """
    return "min" if _SMALLER.search(key) else "max"


def best_of(results: Sequence[Mapping[str, Any]], key: str, *, mode: Mode) -> list[int]:
    """The indices of the results with the best value of the figure ``key``, the best run first.

    Among runs with the same value, the best is the one that began first; among those that began in
    the same second, the one whose id comes first. Results without a finite value are skipped, and
    so are those of trainings that have diverged (:data:`NONFINITE`).
    """
    numbers = {
        place: float(result[key])
        for place, result in enumerate(results)
        if result.get(NONFINITE) is None
        and is_number(result.get(key))
        and math.isfinite(result[key])
    }
    if not numbers:
        return []
    best_value = (max if mode == "max" else min)(numbers.values())
    return in_order({p: results[p] for p, value in numbers.items() if value == best_value})


def in_order(results: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The indices of ``results``, which have the same value, in the order of :func:`best_of`."""

    def began(place: int) -> tuple[bool, str, str]:
        moment = results[place].get("started_at")
        return moment is None, str(moment), str(results[place].get("run_id"))

    return sorted(results, key=began)


@checked
def best(
    where: PathLike = "outputs",
    *,
    objective: str = VALIDATION,
    mode: Mode | None = None,
    experiment: str | None = None,
) -> BestRun:
    """The finished run with the best value of a figure, by default of the validation accuracy.

    Figures of the test should not be used for choosing: the test would no longer be independent.

    Args:
        where: the runs to compare, as in :func:`sparsepipe.results.load_results`.
        objective: a column of the ledger with numbers. Among equal values, the run that began
            first is the best (:func:`best_of`).
        mode: ``max`` or ``min``; None: chosen by the column's name (:func:`mode_of`).
        experiment: name of the experiment whose runs are compared; None: all.

    Raises:
        ConfigError: ``mode`` is neither ``max`` nor ``min``, or no run has the figure.
        NoRunsError: no finished run exists.
        DataError: the runs cannot be read, as in :func:`sparsepipe.results.load_results`.
    """
    from sparsepipe.runs.rundir import RunDir  # and numpy, for which --help need not wait

    rows = rows_of(load_results(where, experiment=experiment))
    places = best_of(rows, objective, mode=mode or mode_of(objective))
    if not places:
        raise without_figure(
            f"no finished run of {where} has {objective}",
            objective,
            {key for row in rows for key, value in row.items() if is_number(value)},
            remedy="name another column of the ledger that has numbers",
        )
    row, root = rows[places[0]], expanded(str(where))
    found = [
        RunDir(path.absolute())
        for path in run_directories(root.parent if root.is_file() else root)
        if path.name == row["run_id"]
    ]
    # The same computation in two experiments has the same run id.
    found.sort(key=lambda run: run.path.parent.name != row.get("name"))
    return BestRun(
        value=float(row[objective]),
        directory=found[0].path if found else None,
        checkpoint=found[0].kept_checkpoint if found else None,
        result=row,
        same=len(places) - 1,
    )


def without_figure(
    message: str, objective: str, figures: Iterable[str], *, remedy: str
) -> ConfigError:
    """The error for runs that lack the figure by which the best is chosen.

    Args:
        message: which runs lack the figure; a similar name among ``figures`` is appended. A figure
            of the test is suggested only if the missing one is of the test too.
        objective: the missing figure.
        figures: the figures that the runs have.
        remedy: how to name another figure; for one of the validation, how to validate is added.
    """
    of_test = objective.startswith("test")
    others = [figure for figure in figures if of_test or not figure.startswith("test")]
    if objective.startswith("val/"):
        remedy = f"train with data.val_share above 0, or {remedy}"
    return ConfigError(f"{message}{nearest(objective, others, lists=True)}", remedy=remedy)
