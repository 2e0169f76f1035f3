"""Where figures were taken: hardware, versions, commit, and whether they were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from sparsepipe.results.report.exhibit import Row

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
    """Why the times of a run say nothing of speedups; empty where they do.

    That is so where several ranks compute on fewer cores than they are: they take turns.
    """
    ranks, cores = _whole(row.get("ranks")), _whole(row.get("machine_cores"))
    if row.get("hardware_accelerator") != "cpu" or ranks is None or ranks < 2:
        return ""
    if row.get("kind", "measured") != "measured":
        return ""
    if cores is None:
        return f"no speedup can be told: {ranks} ranks on CPU cores whose number is not recorded"
    shared = f"{cores} core{'s' if cores > 1 else ''}"
    return f"no speedup: {ranks} ranks share {shared}" if ranks > cores else ""


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
