"""Finished runs as plain rows, and figures taken of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from sparsepipe.results.report.cell import Ours, Row


def plain_rows(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows of a ledger without what they lack, and with lists as such.

    Args:
        records: missing values are None, lists and mappings JSON text.
    """
    return [
        {key: _plain(value) for key, value in record.items() if value is not None}
        for record in records
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def mean_of(
    rows: Sequence[Row], key: str | Callable[[Row], float | None], *, scale: float = 1.0
) -> Ours | None:
    """The mean over runs with its spread; None where no run has the figure.

    Args:
        rows: runs that differ in their seed.
        key: of the figure, or what finds it.
        scale: by which it is multiplied.
    """
    find = key if callable(key) else _value_of(key)
    found = [(row, value) for row in rows if (value := find(row)) is not None]
    if not found:
        return None
    values = [scale * float(value) for _, value in found]
    return Ours(
        value=fmean(values),
        spread=(min(values), max(values)) if len(values) > 1 else None,
        count=len(values),
        runs=tuple(row for row, _ in found),
    )


def _value_of(key: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(key)


_NO_SETTINGS = ("git_commit", "machine_cores", "threads_per_rank", "torch")
"""What figures may depend on beside settings, whose keys have dots."""


def unlike_notes(
    rows: Sequence[Row],
    matters: Callable[[str], bool],
    *,
    of_one_seed: str = "the mean is of all",
) -> list[str]:
    """What is to be said of runs that were averaged, if they are not alike but for their seeds.

    Args:
        rows: of one figure.
        matters: settings, and keys of the machine, that count among runs of unlike seeds.
        of_one_seed: what is made of runs that have even the seed in common.
    """
    by_seed: dict[Any, list[Row]] = {}
    for row in rows:
        by_seed.setdefault(row.get("seed"), []).append(row)
    notes = []
    for seed, runs in by_seed.items():
        if len(runs) > 1:
            keys = ", ".join(differing(runs)) or "nothing that is recorded"
            told = f"runs {_names(runs)} all have seed {seed} and differ in {keys}"
            notes.append(f"{told}: {of_one_seed}")
    keys = ", ".join(key for key in differing(rows) if matters(key))
    if keys and not notes:
        notes.append(f"runs {_names(rows)} differ in {keys}: the mean is of all")
    return notes


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(str(row.get("run_id")) for row in rows)


def differing(runs: Sequence[Row]) -> list[str]:
    """Keys of settings, and of the machine, whose values are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run if "." in key or key in _NO_SETTINGS)
    return [key for key in keys if len({repr(run.get(key)) for run in runs}) > 1]
