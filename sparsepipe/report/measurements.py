"""Figures of finished runs: means over seeds, measuring places, reasons to give no speedup."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from sparsepipe.report.chapter import Ours
from sparsepipe.runs.ledger_table import Row


def plain_rows(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Turns records of a ledger into rows without None, with JSON lists and mappings parsed."""
    rows: list[Row] = []
    for record in records:
        row = {key: value for key, value in record.items() if value is not None}
        if row.get("hardware_accelerator") == "cpu":  # earlier versions did not record it
            row.setdefault("matmul_precision", "highest")
        for key, value in row.items():
            if isinstance(value, str) and value[:1] in ("[", "{"):
                with suppress(ValueError):
                    row[key] = json.loads(value)
        rows.append(row)
    return rows


def mean_of(
    rows: Sequence[Row], key: str | Callable[[Row], float | None], *, scale: float = 1.0
) -> Ours | None:
    """``scale`` times the mean over runs of ``key`` (column or function); None if no run has it."""
    found = []
    for row in rows:
        value = key(row) if callable(key) else row.get(key)
        if value is not None:
            found.append((row, scale * float(value)))
    if not found:
        return None
    values = [value for _, value in found]
    return Ours(
        value=fmean(values),
        spread=(min(values), max(values)) if len(values) > 1 else None,
        count=len(values),
        runs=tuple(row for row, _ in found),
    )


def ratio_of(own: Ours | None, base: Ours | None) -> Ours | None:
    """``own`` and its spread, divided by the value of ``base``; None if either is None."""
    if own is None or base is None:
        return None
    one = float(base.value)
    spread = None if own.spread is None else (own.spread[0] / one, own.spread[1] / one)
    runs = (*own.runs, *(run for run in base.runs if run not in own.runs))
    return Ours(value=float(own.value) / one, spread=spread, count=own.count, runs=runs)


def words(value: str, runs: Sequence[Row], note: str = "") -> Ours:
    """A text in place of a figure; it is not compared with the paper's value."""
    return Ours(value=value, runs=tuple(runs), note=note, counts=False)


_NO_SETTINGS = ("git_commit", "machine_cores", "matmul_precision", "threads_per_rank", "torch")
"""Keys that are not settings, but on which figures may depend."""


def unlike_notes(
    rows: Sequence[Row],
    matters: Callable[[str], bool],
    *,
    of_one_seed: str = "the mean is over all",
) -> list[str]:
    """Notes on averaged runs that share a seed or differ in a key for which ``matters`` is true.

    ``of_one_seed``: text on how runs with the same seed were averaged.
    """
    by_seed: dict[Any, list[Row]] = {}
    for row in rows:
        by_seed.setdefault(row.get("seed"), []).append(row)
    notes = []
    for seed, runs in by_seed.items():
        if len(runs) > 1:
            keys = ", ".join(differing(runs)) or "nothing that is recorded"
            names = ", ".join(str(run.get("run_id")) for run in runs)
            which = f"runs {names} all have seed {seed} and differ in {keys}"
            notes.append(f"{which}: {of_one_seed}")
    keys = ", ".join(key for key in differing(rows) if matters(key))
    if keys and not notes:
        names = ", ".join(str(run.get("run_id")) for run in rows)
        notes.append(f"runs {names} differ in {keys}: the mean is over all")
    return notes


def differing(runs: Sequence[Row]) -> list[str]:
    """Keys of settings and of the machine whose values differ between runs."""
    # The precision that a setting led to counts, whether it was given or the default.
    others = ("hydra.", "study.", "trainer.matmul_precision")
    known = (key for run in runs for key in run if not key.startswith(others))
    keys = dict.fromkeys(key for key in known if "." in key or key in _NO_SETTINGS)
    return [key for key in keys if len({repr(run.get(key)) for run in runs}) > 1]


_PACKAGES = ("python", "torch", "pytorch-lightning", "numpy", "sparsepipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringPlace:
    """Where a figure was measured: kind of run, hardware, versions of packages, and commit."""

    kind: str
    hardware: str
    versions: str
    commit: str

    @property
    def short_commit(self) -> str:
        """The commit's first 12 digits, with what follows its dash, if any."""
        number, dash, changed = self.commit.partition("-")
        return number[:12] + dash + changed

    @classmethod
    def of(cls, row: Row) -> Self:
        kind = str(row.get("kind", "measured"))
        hardware = str(row.get("hardware_devices") or "unknown")
        if hardware != "unknown" and (accelerator := row.get("hardware_accelerator")):
            hardware += f" ({accelerator})"
        if hardware != "unknown" and (cores := row.get("machine_cores")) and kind != "simulated":
            hardware += f", {int(cores)} cores"
        precision = row.get("matmul_precision")
        if hardware != "unknown" and precision not in (None, "highest"):
            hardware += f", {precision} matmul precision"
        return cls(
            kind=str(row.get("kind", "unknown")),
            hardware=hardware,
            versions=", ".join(f"{name} {row[name]}" for name in _PACKAGES if row.get(name)),
            commit=str(row.get("git_commit") or ""),
        )


def letters(rows: Iterable[Row]) -> dict[MeasuringPlace, str]:
    """A letter for each measuring place of ``rows``, in the order of rows; AA follows Z."""
    places = dict.fromkeys(MeasuringPlace.of(row) for row in rows)
    alphabet = [chr(ord("A") + number) for number in range(26)]
    names = [*alphabet, *(first + second for first in alphabet for second in alphabet)]
    return dict(zip(places, names, strict=False))


def crowded(row: Row) -> str:
    """Says why a run on a CPU gives no speedup: too few cores or an unknown number; else empty."""
    ranks, cores = row.get("ranks"), row.get("machine_cores")
    if not _several_on_cores(row):
        return ""
    if cores is None:
        return f"no speedup can be given: the number of CPU cores of {ranks} ranks is not recorded"
    text = f"{cores} core{'s' if cores > 1 else ''}"
    return f"no speedup: {ranks} ranks share {text}" if ranks > cores else ""


def no_speedup(rows: Sequence[Row], base: Sequence[Row], *, of: str) -> str:
    """Says why runs give no speedup over ``base``, the runs on one device, named ``of``; empty if
    they give one.

    One rank on a CPU may use all cores with threads, so several ranks give a speedup only if they
    use more cores.
    """
    for row in rows:
        if reason := crowded(row):
            return reason
        if not base or not _several_on_cores(row):
            continue
        own, other = _cores_at_work(row), _cores_at_work(base[0])
        if own is None or other is None:
            return "no speedup can be given: the number of cores in use is not recorded"
        if own <= other:
            cores = f"{own} core{'s' if own > 1 else ''}"
            return (
                f"no speedup: {row['ranks']} ranks compute on {cores} in all, {of} alone on {other}"
            )
    return ""


def _several_on_cores(row: Row) -> bool:
    is_here = row.get("kind", "measured") == "measured"
    return is_here and row.get("hardware_accelerator") == "cpu" and (row.get("ranks") or 0) > 1


def _cores_at_work(row: Row) -> int | None:
    found = [row.get(key) for key in ("ranks", "threads_per_rank", "machine_cores")]
    known = [int(value) for value in found if value is not None]
    return min(known[0] * known[1], known[2]) if len(known) == len(found) else None
