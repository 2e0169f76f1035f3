"""The best of finished runs by one of their figures."""

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
from sparsepipe.utils.arguments import is_number
from sparsepipe.utils.extensions import nearest
from sparsepipe.utils.files import PathLike, expanded

Mode = Literal["max", "min"]
VALIDATION = "val/accuracy"
"""By this figure a run is the best where nobody names another one."""
_SMALLER = re.compile(r"loss|error|bubble|bytes|(?<!_per)_s(/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRun:
    """A run that is the best of several.

    Attributes:
        value: of the figure by which it is.
        directory: of the run; None where it is not at or below the place that was searched, as of
            a ledger that is kept elsewhere.
        checkpoint: its best checkpoint, else its last one; None where none is left.
        result: its row of the ledger, values by columns.
        same: how many other runs have the same value.
    """

    value: float
    directory: Path | None
    checkpoint: Path | None
    result: Mapping[str, Any] = field(repr=False)
    same: int = 0


def mode_of(key: str) -> Mode:
    """Whether a figure is the best where it is largest or smallest, by its name.

    Losses, errors, times, bytes and bubbles are best when they are small, all else when large.
    """
    return "min" if _SMALLER.search(key) else "max"


def best_of(results: Sequence[Mapping[str, Any]], key: str, *, mode: Mode) -> list[int]:
    """The places of the results with the best value of a figure, that of the best run first.

    Of runs with the same value it is the one that was begun first, and of those that were begun in
    the same second the one whose id comes first. What has no finite number is passed over.
    """
    numbers = {
        place: float(result[key])
        for place, result in enumerate(results)
        if is_number(result.get(key)) and math.isfinite(result[key])
    }
    if not numbers:
        return []
    best_value = (max if mode == "max" else min)(numbers.values())
    return in_order({p: results[p] for p, value in numbers.items() if value == best_value})


def in_order(results: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The places of results with the same value, by the rule of :func:`best_of`."""

    def began(place: int) -> tuple[bool, str, str]:
        moment = results[place].get("started_at")
        return moment is None, str(moment), str(results[place].get("run_id"))

    return sorted(results, key=began)


def best(
    where: PathLike = "outputs",
    *,
    objective: str = VALIDATION,
    mode: Mode | None = None,
    experiment: str | None = None,
) -> BestRun:
    """The finished run with the best value of a figure.

    It is a figure of the validation unless another one is named: who chooses by the test set has no
    test set any more.

    Args:
        where: as of :func:`sparsepipe.results.load_results`.
        objective: a column of the ledger with numbers; of runs with equal values the one that was
            begun first, see :func:`best_of`.
        mode: ``max`` or ``min``; None: by the name, see :func:`mode_of`.
        experiment: only its runs.

    Raises:
        ConfigError: ``mode`` is neither, or no run has such a figure though they have others.
        NoRunsError: no finished run exists.
        DataError: see :func:`sparsepipe.results.load_results`.
    """
    from sparsepipe.runs.rundir import RunDir  # and numpy, for which --help need not wait

    if mode not in (None, "max", "min"):
        raise ConfigError(f"mode={mode!r}", remedy="choose 'max' or 'min', or leave it out")
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
    # The same computation under two names has one run id.
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
    """The error of runs that lack the figure by which one is to be chosen.

    Args:
        message: what lacks it; the nearest of ``figures`` is named behind it, one of the test only
            where ``objective`` is of the test: nobody is to choose by that for want of another.
        objective: the figure.
        figures: that there are.
        remedy: names others; comes after that of a missing validation.
    """
    of_test = objective.startswith("test")
    others = [figure for figure in figures if of_test or not figure.startswith("test")]
    if objective.startswith("val/"):
        remedy = f"train with data.val_share above 0, or {remedy}"
    return ConfigError(f"{message}{nearest(objective, others, lists=True)}", remedy=remedy)
