"""Figures of finished runs: means over seeds, their machines, and when times are no speedup."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from sparsepipe.report.chapter import Ours, Row


def plain_rows(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows of a ledger without what they lack, and with lists as such."""
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
    """The mean over runs with its spread; None where no run has the figure."""
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


def ratio_of(own: Ours, base: Ours) -> Ours:
    """One mean over another, from the runs of both; the spread is that of ``own``."""
    one = float(base.value)
    spread = None if own.spread is None else (own.spread[0] / one, own.spread[1] / one)
    runs = (*own.runs, *(run for run in base.runs if run not in own.runs))
    return Ours(value=float(own.value) / one, spread=spread, count=own.count, runs=runs)


def _value_of(key: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(key)


_NO_SETTINGS = ("git_commit", "machine_cores", "threads_per_rank", "torch")
"""Keys without a dot that figures may depend on, beside the settings."""


def unlike_notes(
    rows: Sequence[Row],
    matters: Callable[[str], bool],
    *,
    of_one_seed: str = "the mean is of all",
) -> list[str]:
    """Notes on runs that were averaged although they differ in more than their seeds."""
    by_seed: dict[Any, list[Row]] = {}
    for row in rows:
        by_seed.setdefault(row.get("seed"), []).append(row)
    notes = []
    for seed, runs in by_seed.items():
        if len(runs) > 1:
            keys = ", ".join(differing(runs)) or "nothing that is recorded"
            which = f"runs {_names(runs)} all have seed {seed} and differ in {keys}"
            notes.append(f"{which}: {of_one_seed}")
    keys = ", ".join(key for key in differing(rows) if matters(key))
    if keys and not notes:
        notes.append(f"runs {_names(rows)} differ in {keys}: the mean is of all")
    return notes


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(str(row.get("run_id")) for row in rows)


def differing(runs: Sequence[Row]) -> list[str]:
    """Keys of settings, and of the machine, whose values are not the same in all runs."""
    known = (key for run in runs for key in run if not key.startswith("hydra."))
    keys = dict.fromkeys(key for key in known if "." in key or key in _NO_SETTINGS)
    return [key for key in keys if len({repr(run.get(key)) for run in runs}) > 1]


_PACKAGES = ("python", "torch", "pytorch-lightning", "numpy", "sparsepipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A machine with what ran on it."""

    kind: str
    hardware: str
    versions: str
    commit: str

    @property
    def short_commit(self) -> str:
        number, dash, changed = self.commit.partition("-")
        return number[:12] + dash + changed

    @classmethod
    def of(cls, row: Row) -> Self:
        return cls(
            kind=str(row.get("kind", "unknown")),
            hardware=hardware_text(row),
            versions=", ".join(f"{name} {row[name]}" for name in _PACKAGES if row.get(name)),
            commit=str(row.get("git_commit") or ""),
        )


def hardware_text(row: Row) -> str:
    """Text such as ``2 x Xeon (cpu), 2 cores``."""
    devices, accelerator = row.get("hardware_devices"), row.get("hardware_accelerator")
    if not devices:
        return "unknown"
    text = f"{devices} ({accelerator})" if accelerator else str(devices)
    cores = row.get("machine_cores")
    is_here = row.get("kind", "measured") != "simulated"
    return f"{text}, {int(cores)} cores" if cores and is_here else text


def letters(rows: Iterable[Row]) -> dict[Place, str]:
    """A letter for each place, in the order of the runs."""
    places = list(dict.fromkeys(Place.of(row) for row in rows))
    return {place: _letter(number) for number, place in enumerate(places)}


def _letter(number: int) -> str:
    rest, last = divmod(number, 26)
    return (_letter(rest - 1) if rest else "") + chr(ord("A") + last)


def crowded(row: Row) -> str:
    """Why the times of a run say nothing of speedups; empty where they may.

    That is so where several ranks compute on fewer cores than they are: they take turns.
    """
    ranks, cores = _whole(row.get("ranks")), _whole(row.get("machine_cores"))
    if not _several_on_cores(row) or ranks is None:
        return ""
    if cores is None:
        return f"no speedup can be given: {ranks} ranks on CPU cores whose number is not recorded"
    return f"no speedup: {ranks} ranks share {_cores(cores)}" if ranks > cores else ""


def no_speedup(row: Row, base: Row | None, *, of: str) -> str:
    """Why the times of a run are no speedup over another run; empty where they are.

    On a processor one device may compute on all cores by threads: several ranks are a speedup of
    several devices only where more cores compute than in the run that is theirs to beat.

    Args:
        row: the run.
        base: the other one, of one device; None where there is none.
        of: what the other one is, in print.
    """
    if (reason := crowded(row)) or base is None or not _several_on_cores(row):
        return reason
    own, other = _cores_at_work(row), _cores_at_work(base)
    if own is None or other is None:
        return "no speedup can be given: on how many cores was computed is not recorded"
    if own > other:
        return ""
    ranks = _whole(row.get("ranks"))
    return f"no speedup: {ranks} ranks compute on {_cores(own)} in all, {of} alone on {other}"


def _several_on_cores(row: Row) -> bool:
    ranks = _whole(row.get("ranks"))
    is_cpu = row.get("hardware_accelerator") == "cpu"
    return is_cpu and ranks is not None and ranks > 1 and row.get("kind", "measured") == "measured"


def _cores_at_work(row: Row) -> int | None:
    found = [_whole(row.get(key)) for key in ("ranks", "threads_per_rank", "machine_cores")]
    ranks, threads, cores = found
    if ranks is None or threads is None or cores is None:
        return None
    return min(ranks * threads, cores)


def _cores(count: int) -> str:
    return f"{count} core{'s' if count > 1 else ''}"


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
