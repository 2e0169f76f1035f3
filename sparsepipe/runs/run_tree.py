"""The finished runs of a tree of run directories, and their results.

A run's directory has ``config.yaml`` from its beginning and ``result.json`` towards its end;
``DONE.json`` is written last, so that a run with it is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
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
"""The task whose runs have no figures of their own: they describe others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Finished runs of a tree by directory, and the numbers of other runs."""

    rows: Mapping[Path, dict[str, Any]]
    unfinished: int = 0
    broken: int = 0


def read_tree(root: Path) -> Tree:
    """Reads all finished runs at or below a directory.

    A result that cannot be read is skipped with a warning. Runs may
    begin, end and be removed while the tree is read.

    Raises:
        DataError: a directory cannot be read, or one run lies in two of them.
    """
    rows: dict[Path, dict[str, Any]] = {}
    unfinished = broken = 0
    for path in run_directories(root):
        try:
            row = _read_run(path) if _is_done(path) else None
        except DataError as error:
            row = None
            if _is_done(path):  # else it was started anew meanwhile
                broken += 1
                _warn_of_broken(path, error)
                continue
        if row is None:
            unfinished += 1
        elif row.get("task_name") != _REPORT:
            rows[path] = row
    _check_once(rows)
    return Tree(rows=rows, unfinished=unfinished, broken=broken)


def run_directories(root: Path) -> Iterator[Path]:
    """The directories of runs at or below a directory, in order of their names.

    Not hidden ones, in which runs are removed; and none twice, where links lead to it as well.

    Raises:
        DataError: a directory cannot be read.
    """
    return (path for path, is_run in _walk(root) if is_run)


def directories_without_runs(root: Path, names: Collection[str]) -> list[Path]:
    """Directories with a file of one of these names and no finished run at or below them.

    Reports do not count, which are no rows. A finished run whose result cannot be read does: it may
    be one, and :func:`read_tree` warns of it.

    Raises:
        DataError: a directory cannot be read.
    """
    places = list(_walk(root))
    done = [path for path, is_run in places if is_run and _is_done(path)]
    return [
        path
        for path, is_run in places
        if not is_run
        and any((path / name).is_file() for name in names)
        and not any(path in run.parents and _may_be_row(run) for run in done)
    ]


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
        if not is_run:
            ahead.extend(sorted(_directories(path), reverse=True))


def moment(time_s: float) -> str:
    """A Unix time as text: UTC, to the second."""
    return datetime.fromtimestamp(time_s, tz=UTC).isoformat(timespec="seconds")


def identity_text(row: Mapping[str, Any]) -> str:
    """Name of a row's run."""
    return f"run {row.get('run_id')} of experiment {row.get('name')}"


def _directories(path: Path) -> list[Path]:
    try:
        return [item for item in path.iterdir() if item.name[0] != "." and item.is_dir()]
    except FileNotFoundError:
        return []  # removed since it was found
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}",
            remedy="check its permissions, or give another directory of runs",
        ) from error


def _is_done(path: Path) -> bool:
    return (path / _DONE).exists()


def _may_be_row(path: Path) -> bool:
    try:
        return _read_run(path).get("task_name") != _REPORT
    except DataError:
        return True


def _read_run(path: Path) -> dict[str, Any]:
    """The content of ``result.json``, with keys that older versions did not write."""
    found = read_mapping(path / _RESULT)
    known = {"name": path.absolute().parent.name, "run_id": path.name, "finished_at": _ended(path)}
    return {**found, **{key: item for key, item in known.items() if found.get(key) is None}}


def _warn_of_broken(path: Path, error: DataError) -> None:
    log.warning(
        "%s; the run is left out. remedy: remove %s and give the run's command again, which "
        "then writes its result anew",
        error.message,
        path / _DONE,
    )


def _ended(path: Path) -> str | None:
    try:
        return moment(read_mapping(path / _DONE, time=reading.amount)["time"])
    except (DataError, ValueError, OverflowError, OSError):
        return None  # that the file is there is all that counts


def _check_once(rows: Mapping[Path, Mapping[str, Any]]) -> None:
    first: dict[tuple[str, str], Path] = {}
    for path, row in rows.items():
        other = first.setdefault((str(row["name"]), str(row["run_id"])), path)
        if other != path:
            raise DataError(
                f"{identity_text(row)} is in {other} and in {path}",
                remedy="remove the copy, move it out of the tree, or give a directory that has one "
                "of them",
            )
