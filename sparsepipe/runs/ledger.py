"""The ledger: the results of many finished runs as one table, in memory and in files.

A run writes ``config.yaml`` at its beginning, ``result.json`` towards its end and ``DONE.json``
last, which marks it as finished.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.runs.ledger_table import Row, cell_text, cell_value, frame_of, rows_of
from sparsepipe.runs.rundir import moment
from sparsepipe.utils import reading
from sparsepipe.utils.files import (
    LockHeldError,
    PathLike,
    expanded,
    file_lock,
    read_mapping,
    write_bytes_atomic,
    write_csv,
    writing,
)

if TYPE_CHECKING:
    import pandas as pd


log = logging.getLogger(__name__)
LOCK = ".ledger.lock"
_LIMIT_BYTES = 1 << 28
"""Largest size of a ledger's file, in which a run takes a few kilobytes."""
_LIMIT_S = 60.0
"""Longest wait for another process that writes the ledger; thousands of runs take seconds."""
Kind = Literal["measured", "emulated", "simulated"]
PARQUET, CSV = "ledger.parquet", "ledger.csv"
_NEEDED = {"run_id", "kind"}
_BEGUN, _RESULT, _DONE = "config.yaml", "result.json", "DONE.json"
_RUN = "run {1} of experiment {0}"
_REPORT = "report"
"""Name of the task whose runs describe other runs: they are not rows of the ledger."""


def load_results(
    where: PathLike = "outputs", *, experiment: str | None = None, kind: Kind | None = None
) -> pd.DataFrame:
    """The results of finished runs, one row for each, ordered by experiment and run id.

    Columns are the keys of ``result.json``, with the same order and types from every source;
    docs/results.md explains them. Lists are JSON text.

    Args:
        where: a directory of runs, of one experiment or of several, or a ledger's file (Parquet or
            CSV). In a directory, ledgers in subdirectories without runs are read too; a run in
            several ledgers counts once, and an unreadable ledger further below is skipped with a
            warning. ``~`` and environment variables are expanded.
        experiment: name of the experiment whose runs are read, which are those below the directory
            of this name and those of this name in ledgers elsewhere; None: all.
        kind: ``measured``, ``emulated`` or ``simulated``, to read only runs of this kind; None:
            all.

    Raises:
        NoRunsError: ``where`` does not exist, or contains no finished run of the experiment and
            kind.
        DataError: runs cannot be read, a file is not a valid ledger, or a run exists twice.
    """
    source = expanded(where)
    if source.exists() and not source.is_dir():
        rows = _chosen(_rows_of_file(source), "name", experiment, source)
    else:
        rows = _rows_below(source, experiment)
    return _table(_chosen(rows, "kind", kind, source))


def gather(experiment_dir: PathLike, *, to: PathLike | None = None) -> pd.DataFrame:
    """Writes ``ledger.parquet`` and ``ledger.csv`` of all finished runs of an experiment.

    Files are replaced atomically, and the same runs always give the same rows and columns.
    Processes that write a ledger at the same time wait for each other, so that the last one writes
    all rows.

    Args:
        experiment_dir: the directory of the runs.
        to: the directory to write to; None: ``experiment_dir``.

    Returns:
        The table, as :func:`load_results` reads it from either file.

    Raises:
        DataError: no finished run exists, a run exists twice, a file cannot be written, or another
            process has been writing the ledger for a minute.
    """
    source = expanded(experiment_dir)
    if not source.is_dir():
        raise DataError(
            f"directory {source} not found",
            remedy="give the directory of an experiment's runs, such as outputs/demo",
        )
    directory = source if to is None else expanded(to)
    with writing(directory, error=DataError), ExitStack() as held:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with suppress(OSError, NotImplementedError):  # a file system without locks
                held.enter_context(file_lock(directory / LOCK, wait_s=_LIMIT_S))
        except LockHeldError:
            raise DataError(
                f"another process has been writing the ledger in {directory} for {_LIMIT_S:g} s",
                remedy="end it, then write the ledger anew (sparsepipe.runs.ledger.gather)",
            ) from None
        tree = read_tree(source)  # processes that finish a run meanwhile write after this one
        if not tree.rows:
            raise _without_runs(tree, source)
        frame = _table(tree.rows.values())
        stream = io.BytesIO()
        frame.to_parquet(stream, engine="pyarrow", index=False)
        write_bytes_atomic(directory / PARQUET, stream.getvalue())
        cells = [{cell_text(k): cell_text(v) for k, v in row.items()} for row in rows_of(frame)]
        write_csv(directory / CSV, cells)
        return frame


def _table(rows: Iterable[Row]) -> pd.DataFrame:
    return frame_of(sorted(rows, key=lambda row: (str(row.get("name")), str(row["run_id"]))))


def _rows_below(source: Path, experiment: str | None) -> list[dict[str, Any]]:
    """The rows of all runs in a directory tree, and of the ledgers in directories without runs."""
    if not source.is_dir():
        raise NoRunsError(
            f"{source} not found",
            remedy="give the directory that runs are written to (paths.outputs, outputs by "
            "default), one of its experiments, or a ledger's file",
        )
    tree, own = read_tree(source), source / (experiment or "")
    finished = [*tree.rows, *tree.broken]
    placed: list[tuple[Path, dict[str, Any]]] = []
    for place in tree.others:
        files = [place / name for name in (PARQUET, CSV) if (place / name).is_file()]
        if not files or any(place in run.parents for run in finished):
            continue
        try:
            placed += ((files[0], row) for row in _rows_of_file(files[0]))
        except DataError as error:
            if place in (source, own):
                raise
            log.warning(
                "%s; the ledger is left out. remedy: write it anew "
                "(sparsepipe.runs.ledger.gather), or move it elsewhere",
                error.message,
            )
    placed += tree.rows.items()
    found = {
        (str(row.get("name")), str(row["run_id"])): row
        for path, row in placed
        if path.is_relative_to(own) or row.get("name") == experiment
    }
    below = [path for path in (*tree.unfinished, *tree.broken) if path.is_relative_to(own)]
    if not found and (below or not placed):
        raise _without_runs(tree, own if own.is_dir() else source)
    return list(found.values()) or _chosen([row for _, row in placed], "name", experiment, source)


def _without_runs(tree: Tree, source: Path) -> DataError:
    """The error for a directory without finished runs."""
    counts = {"unfinished": tree.unfinished, "with a broken result.json": tree.broken}
    others = [
        f"{number} {what}"
        for what, paths in counts.items()
        if (number := sum(path.is_relative_to(source) for path in paths))
    ]
    return (DataError if tree.broken else NoRunsError)(
        f"{source} has no finished run" + (f", but {' and '.join(others)}" if others else ""),
        remedy="run the experiment (sparsepipe -m experiment=NAME), which resumes unfinished runs, "
        "or give the directory of its runs",
    )


def _rows_of_file(source: Path) -> list[dict[str, Any]]:
    import pandas as pd
    from pyarrow import ArrowException, parquet

    remedy = (
        f"give {PARQUET} or {CSV} of an experiment, or the directory of its runs; "
        "sparsepipe.runs.ledger.gather writes the files anew"
    )
    with reading.explained(source, "ledger", error=DataError, remedy=remedy):
        reading.check_regular(source, limit_bytes=_LIMIT_BYTES)
        try:
            if source.suffix.lower() == ".parquet":
                rows: list[dict[str, Any]] = parquet.read_table(source).to_pylist()
            else:
                # As text, with the names as the first row: cell_value finds the types.
                frame = pd.read_csv(
                    source, header=None, dtype=str, na_filter=False, skip_blank_lines=False
                )
                head, *cells = [list(map(cell_value, row)) for row in frame.to_numpy().tolist()]
                rows = [dict(zip(map(str, head), row, strict=True)) for row in cells]
        except ArrowException as error:  # not always a ValueError
            raise ValueError(str(error).partition("\n")[0]) from error
        if lacking := _NEEDED - set(rows[0] if rows else ()):
            raise ValueError(f"its first row lacks {' and '.join(sorted(lacking))}")
        counts = Counter((str(row.get("name")), str(row.get("run_id"))) for row in rows)
        if twice := [_RUN.format(*run) for run, count in counts.items() if count > 1]:
            raise ValueError(f"it has {twice[0]} more than once")
    return rows


def _chosen(
    rows: list[dict[str, Any]], key: str, value: str | None, source: Path
) -> list[dict[str, Any]]:
    """The rows in which ``key`` is ``value`` (None: all rows); a NoRunsError if there are none."""
    found = [row for row in rows if value is None or row.get(key) == value]
    if value is not None and not found:
        what = "experiment" if key == "name" else key
        there = sorted({str(row.get(key)) for row in rows})
        raise NoRunsError(
            f"{source} has no finished run of {what} {value!r}",
            remedy=f"choose one of {', '.join(there)}, or run the missing one",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The runs in a directory tree, and its other directories.

    Attributes:
        rows: the results of finished runs, by directory.
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
    """
    rows: dict[Path, dict[str, Any]] = {}
    unfinished, broken, others, first = [], [], [], dict[tuple[str, str], Path]()
    for path, is_run in _walk(root):
        if not is_run:
            others.append(path)
            continue
        row = None
        try:
            row = _result_of(path) if (path / _DONE).exists() else None
        except DataError as error:
            if (path / _DONE).exists():  # else the run has just been started anew
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
            run = str(row["name"]), str(row["run_id"])
            if (other := first.setdefault(run, path)) != path:
                raise DataError(
                    f"{_RUN.format(*run)} is in {other} and in {path}",
                    remedy="remove the copy, move it out of the tree, or give a directory with "
                    "only one of them",
                )
    return Tree(rows=rows, unfinished=unfinished, broken=broken, others=others)


def _result_of(path: Path) -> dict[str, Any]:
    """The content of ``result.json``; adds experiment, run id and time of the end if missing."""
    found = read_mapping(path / _RESULT)
    try:
        ended = moment(read_mapping(path / _DONE, time=reading.amount)["time"])
    except (DataError, ValueError, OverflowError, OSError):
        ended = None  # but the run is finished
    known = {"name": path.absolute().parent.name, "run_id": path.name, "finished_at": ended}
    return {**found, **{key: item for key, item in known.items() if found.get(key) is None}}


def run_directories(root: Path) -> Iterator[Path]:
    """The directories of runs at or below a directory, ordered by name.

    Hidden directories, from which runs are being removed, are left out; a directory reached by
    several links comes once. Raises a DataError if a directory cannot be read.
    """
    return (path for path, is_run in _walk(root) if is_run)


def _walk(root: Path) -> Iterator[tuple[Path, bool]]:
    """Yields all directories of a tree but those within runs, and whether each is a run's."""
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
