"""Where figures were taken: hardware, versions, commit, and whether they were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from sparsepipe.results.report.cell import Row

_PACKAGES = ("python", "torch", "pytorch-lightning", "numpy", "sparsepipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A machine with what ran on it.

    Attributes:
        kind: measured, emulated or simulated.
        hardware: devices in words.
        versions: of the interpreter and of packages.
        commit: of the checkout; empty where none is known.
    """

    kind: str
    hardware: str
    versions: str
    commit: str

    @property
    def short_commit(self) -> str:
        """As it is printed."""
        number, dash, changed = self.commit.partition("-")
        return number[:12] + dash + changed

    @classmethod
    def of(cls, row: Row) -> Self:
        """Where a run was."""
        return cls(
            kind=str(row.get("kind", "unknown")),
            hardware=hardware_text(row),
            versions=", ".join(f"{name} {row[name]}" for name in _PACKAGES if row.get(name)),
            commit=str(row.get("git_commit") or ""),
        )


def hardware_text(row: Row) -> str:
    """Such as ``2 x Xeon (cpu), 2 cores``."""
    devices, accelerator = row.get("hardware_devices"), row.get("hardware_accelerator")
    if not devices:
        return "unknown"
    text = f"{devices} ({accelerator})" if accelerator else str(devices)
    cores = row.get("machine_cores")
    is_here = row.get("kind", "measured") != "simulated"
    return f"{text}, {int(cores)} cores" if cores and is_here else text


def letters(rows: Iterable[Row]) -> dict[Place, str]:
    """A letter for each place, in the order in which runs name them."""
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
        return f"no speedup can be told: {ranks} ranks on CPU cores whose number is not recorded"
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
        return "no speedup can be told: on how many cores was computed is not recorded"
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
