"""The finished runs of a tree of run directories, and their results.

A run's directory has ``config.yaml`` from its beginning and ``result.json`` towards its end;
``DONE.json`` is written last, so that a run with it is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsepipe.errors import DataError
from sparsepipe.utils import reading
from sparsepipe.utils.files import read_mapping

log = logging.getLogger(__name__)

_BEGUN, _RESULT, _DONE = "config.yaml", "result.json", "DONE.json"
_REPORT = "report"
"""The task whose runs describe other runs and have no figures of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Finished runs of a tree by directory, and its other directories.

    Attributes:
        rows: results of finished runs.
        unfinished: directories of unfinished runs.
        broken: directories of finished runs whose result cannot be read.
        others: directories that belong to no run.
    """

    rows: Mapping[Path, dict[str, Any]]
    unfinished: Sequence[Path]
    broken: Sequence[Path]
    others: Sequence[Path]


def read_tree(root: Path) -> Tree:
    """Reads all finished runs at or below a directory.

    A result that cannot be read is skipped with a warning. Runs may begin, end and be removed
    while the tree is read.

    Raises:
        DataError: a directory cannot be read, or one run lies in two of them.
    """
    rows: dict[Path, dict[str, Any]] = {}
    unfinished, broken, others, first = [], [], [], dict[tuple[str, str], Path]()
    for path, is_run in _walk(root):
        if not is_run:
            others.append(path)
            continue
        try:
            row = _read_run(path) if (path / _DONE).exists() else None
        except DataError as error:
            row = None
            if (path / _DONE).exists():  # else it was started anew meanwhile
                broken.append(path)
                log.warning(
                    "%s; the run is left out. remedy: remove %s and give the run's command again, "
                    "which then writes its result anew",
                    error.message,
                    path / _DONE,
                )
                continue
        if row is None:
            unfinished.append(path)
        elif row.get("task_name") != _REPORT:
            rows[path] = row
            other = first.setdefault((str(row["name"]), str(row["run_id"])), path)
            if other != path:
                raise DataError(
                    f"{identity_text(row)} is in {other} and in {path}",
                    remedy="remove the copy, move it out of the tree, or give a directory that has "
                    "one of them",
                )
    return Tree(rows=rows, unfinished=unfinished, broken=broken, others=others)


def run_directories(root: Path) -> Iterator[Path]:
    """The directories of runs at or below a directory, in order of their names.

    Hidden ones, in which runs are removed, are left out; a directory that links lead to as well
    comes once.

    Raises:
        DataError: a directory cannot be read.
    """
    return (path for path, is_run in _walk(root) if is_run)


def _walk(root: Path) -> Iterator[tuple[Path, bool]]:
    """Directories by name, and whether each is a run's; runs are not entered."""
    ahead, seen = [root], set()
    while ahead:
        path = ahead.pop()
        place = path.resolve()
        if place in seen:
            continue
        seen.add(place)
        is_run = (path / _BEGUN).is_file() or (path / _RESULT).is_file()
        yield path, is_run
        try:
            inner = [] if is_run else list(path.iterdir())
        except FileNotFoundError:
            continue  # removed since it was found
        except OSError as error:
            raise DataError(
                f"{path} cannot be read: {error.strerror or error}",
                remedy="check its permissions, or give another directory of runs",
            ) from error
        found = sorted(item for item in inner if item.name[0] != "." and item.is_dir())
        ahead.extend(reversed(found))


def moment(time_s: float) -> str:
    """A Unix time as text: UTC, to the second."""
    return datetime.fromtimestamp(time_s, tz=UTC).isoformat(timespec="seconds")


def identity_text(row: Mapping[str, Any]) -> str:
    """Name of a row's run."""
    return f"run {row.get('run_id')} of experiment {row.get('name')}"


def _read_run(path: Path) -> dict[str, Any]:
    """The content of ``result.json``, with its name, id and end where it lacks them."""
    found = read_mapping(path / _RESULT)
    try:
        ended = moment(read_mapping(path / _DONE, time=reading.amount)["time"])
    except (DataError, ValueError, OverflowError, OSError):
        ended = None  # that the file exists is all that counts
    known = {"name": path.absolute().parent.name, "run_id": path.name, "finished_at": ended}
    return {**found, **{key: item for key, item in known.items() if found.get(key) is None}}
