"""What a sweep was asked for and has no finished run of: for the report at its end. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from sparsepipe.results.report.wanted import Wanted
from sparsepipe.sweep.record import JobRecord

_MOST = 8
"""Beyond so many, as searches of the best have, a report would be nothing but gaps."""
_OF_NO_FIGURE = (
    *("checkpoint", "experiment", "force", "hydra", "logger", "name", "objective", "paths"),
    "tags",
)
"""Keys and groups that commands have otherwise, or that change nothing in a table."""
_OF_CELLS = {
    "": ("parallel", "parallel.devices", "parallel.num_nodes", "parallel.strategy", "task"),
    "network": ("data.point_ratio", "data.representation", "model", "representation"),
}
"""Keys and groups that say of which cell a run is; some do where an experiment sweeps a group."""


def wanted_of(records: Sequence[JobRecord], swept: Iterable[str]) -> list[Wanted]:
    """What to tell the gaps of, by the scale and the overrides of jobs.

    Args:
        records: of all jobs of the sweep.
        swept: keys and groups that the experiment sweeps by itself: its cells tell them.

    Returns:
        None of them where any of their jobs has finished, since its run has a table. Nothing where
        there are too many.
    """
    own = {name.lstrip("+") for name in swept}
    jobs: dict[Wanted, list[JobRecord]] = {}
    for record in records:
        jobs.setdefault(_wanted(record.overrides, own), []).append(record)
    found = [
        replace(wanted, seeds=_seeds(theirs))
        for wanted, theirs in jobs.items()
        if all(each.run is None for each in theirs)
    ]
    return found if len(found) <= _MOST else []


def taken(found: Iterable[Wanted], is_taken: Callable[[Sequence[str]], bool]) -> list[Wanted]:
    """The same without overrides that a check refuses, each once.

    Args:
        found: what is wanted.
        is_taken: whether the check takes overrides together.
    """
    return list(dict.fromkeys(_taken(wanted, is_taken) for wanted in found))


def _taken(wanted: Wanted, is_taken: Callable[[Sequence[str]], bool]) -> Wanted:
    if not wanted.overrides or is_taken(wanted.setting):
        return wanted
    kept: list[str] = []
    # Options of groups first: keys may be theirs.
    for word in sorted(wanted.overrides, key=lambda word: "." in word.partition("=")[0]):
        if is_taken(replace(wanted, overrides=(*kept, word)).setting):
            kept.append(word)
    ordered = tuple(word for word in wanted.overrides if word in kept)
    return replace(wanted, overrides=ordered or None)


def _wanted(overrides: Iterable[str], swept: Collection[str]) -> Wanted:
    scale, kept, of_task, is_of_cells = None, [], [], True
    for word in (each.lstrip("+") for each in overrides):
        name, _, value = word.lstrip("~").partition("=")
        first = re.split(r"[./@]", name)[0]
        if name == "scale":
            scale = value
        elif name in (*swept, "seed") or first in _OF_NO_FIGURE:
            continue
        elif _is_of_cell(name, swept):
            is_of_cells = False
        elif first == "task" and "trial" in swept:
            of_task.append(word)
        elif first != "parallel" or "trial" not in swept:  # else only some cells could take it
            kept.append(word)
    told = tuple(kept) if kept or is_of_cells else None
    return Wanted(scale=scale, overrides=told, of_task=tuple(of_task))


def _is_of_cell(name: str, swept: Collection[str]) -> bool:
    told = [key for group, keys in _OF_CELLS.items() if not group or group in swept for key in keys]
    is_of_swept_task = name.startswith("task.") and "task" in swept
    of_strategy = name.startswith("parallel.strategy.") and "trial" not in swept
    return name in told or is_of_swept_task or of_strategy


def _seeds(records: Sequence[JobRecord]) -> str:
    """As one override; empty where no job has one."""
    words = (each.lstrip("+").partition("=") for record in records for each in record.overrides)
    found = dict.fromkeys(value for name, _, value in words if name == "seed")
    return f"seed={','.join(found)}" if found else ""
