"""The ledger: the results of many runs as one table, in memory and as files.

:func:`load_results` is the one way to read results, from a tree of run directories or from a
ledger's file; :func:`gather` writes the ledger of an experiment. Only finished runs are in it, and
none of ``task=report``, which has no figures of its own.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.runs.ledger_table import Row, cell_text, cell_value, frame_of, rows_of
from sparsepipe.runs.run_tree import (
    Tree,
    directories_without_runs,
    identity_text,
    read_tree,
)
from sparsepipe.utils import reading
from sparsepipe.utils.files import (
    LockHeldError,
    PathLike,
    expanded,
    explained_errors,
    file_lock,
    write_bytes_atomic,
)
from sparsepipe.utils.tables import write_csv

if TYPE_CHECKING:
    import pandas as pd


log = logging.getLogger(__name__)
LOCK = ".ledger.lock"
_LIMIT_BYTES = 1 << 28
"""Of a ledger's file: a run takes a few kilobytes."""
_LIMIT_S = 60.0
"""A ledger of thousands of runs takes seconds: who takes longer has been stopped."""


@contextmanager
def ledger_locked(directory: Path) -> Iterator[None]:
    """Locks the ledger of a directory; without a lock where the file system has none. Raises a
    DataError where another process holds it for long, or the directory cannot be made.
    """
    path = directory / LOCK
    with explained_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(path, wait_s=_LIMIT_S, on_wait=partial(_log_wait, path)))
        except LockHeldError:
            raise DataError(
                f"another process has been making the ledger in {directory} for longer than "
                f"{_LIMIT_S:g} s",
                remedy="end it where it hangs, then write the ledger anew "
                "(sparsepipe.runs.ledger.gather)",
            ) from None
        except (OSError, NotImplementedError) as error:
            log.info(
                "%s cannot be locked (%s), so that another process may write the ledger at the "
                "same time. remedy: have its owner remove it, or let others write it",
                path,
                error,
            )
        yield


def _log_wait(path: Path) -> None:
    log.info("another process makes the ledger in %s: waiting for it", path.parent)


Kind = Literal["measured", "emulated", "simulated"]
PARQUET, CSV = "ledger.parquet", "ledger.csv"
_NEEDED = {"run_id", "kind"}


def load_results(
    where: PathLike = "outputs", *, experiment: str | None = None, kind: Kind | None = None
) -> pd.DataFrame:
    """The results of finished runs, a row each, by experiment and run id.

    Columns are the keys of ``result.json``, in the same order and of the same types from
    whichever source; docs/results.md says what they mean. Lists are JSON text.

    Args:
        where: a directory of runs, of an experiment or of several; or a ledger's file (Parquet or
            CSV). Ledgers in directories at or below that have no runs count as well, a run that is
            in several of them once; an unreadable one further below is skipped with a
            warning. ``~`` and environment variables count.
        experiment: only its runs: those below the directory of this name and those that ledgers
            elsewhere have of it; without such a directory all whose ``name`` it is.
        kind: only runs of this kind.

    Raises:
        NoRunsError: there is no such file or directory, no finished run in it or none of that
            experiment and kind.
        DataError: runs that are there cannot be read, a file is no ledger, or a run is there twice.
    """
    source = expanded(where)
    if source.exists() and not source.is_dir():
        rows = _chosen(_rows_of_file(source), "name", experiment, source)
    else:
        rows = _rows_below(source, experiment)
    return _table(_chosen(rows, "kind", kind, source))


def gather(experiment_dir: PathLike, *, to: PathLike | None = None) -> pd.DataFrame:
    """Writes ``ledger.parquet`` and ``ledger.csv`` of all finished runs of an experiment.

    Each appears whole or not at all, and in the same rows and columns whenever it is written. Of
    processes that do so at a time each waits for the one before, so that the last one has all rows.

    Args:
        experiment_dir: the directory of the runs.
        to: the directory of the files; None: beside the runs.

    Returns:
        The table, as :func:`load_results` reads it from either file.

    Raises:
        DataError: there is no finished run, one is there twice, a file cannot be written, or
            another process has been writing them for long.
    """
    source = expanded(experiment_dir)
    if not source.is_dir():
        raise DataError(
            f"there is no directory {source}",
            remedy="give the directory of an experiment's runs, such as outputs/demo",
        )
    directory = source if to is None else expanded(to)
    with ledger_locked(directory):  # what others finish meanwhile, they write after this
        return _write(_table(_finished(read_tree(source), source)), directory)


def _write(frame: pd.DataFrame, directory: Path) -> pd.DataFrame:
    stream = io.BytesIO()
    frame.to_parquet(stream, engine="pyarrow", index=False)
    write_bytes_atomic(directory / PARQUET, stream.getvalue())
    write_csv(
        directory / CSV,
        [
            {cell_text(name): cell_text(value) for name, value in row.items()}
            for row in rows_of(frame)
        ],
    )
    return frame


def _table(rows: Iterable[Row]) -> pd.DataFrame:
    return frame_of(sorted(rows, key=lambda row: (str(row.get("name")), str(row["run_id"]))))


def _rows_below(source: Path, experiment: str | None) -> list[dict[str, Any]]:
    """Rows of a tree of runs, and of ledgers in directories without runs."""
    if not source.is_dir():
        raise NoRunsError(
            f"there is no {source}",
            remedy="give the directory that runs are written to (paths.outputs, outputs by "
            "default), one of its experiments, or a ledger's file",
        )
    own = source if experiment is None else source / experiment
    runs = own if own.is_dir() else source
    tree = read_tree(runs)
    placed = [
        (file, row)
        for file in _ledgers(source)
        for row in _rows_found(file, required=file.parent in (source, own))
    ]
    if not tree.rows and (tree.broken or not placed):
        return _finished(tree, runs)
    placed += tree.rows.items()
    found = {
        (str(row.get("name")), str(row["run_id"])): row
        for path, row in placed
        if path.is_relative_to(own) or row.get("name") == experiment
    }
    if not found and tree.unfinished and runs == own:
        return _finished(tree, own)  # unfinished runs explain the gap
    everything = [row for _, row in placed]
    return list(found.values()) or _chosen(everything, "name", experiment, source)


def _ledgers(root: Path) -> list[Path]:
    """Files of ledgers at or below a directory, one for each directory without runs."""
    files = [
        [path / name for name in (PARQUET, CSV) if (path / name).is_file()]
        for path in directories_without_runs(root, (PARQUET, CSV))
    ]
    return [there[0] for there in files if there]


def _rows_found(file: Path, *, required: bool) -> list[dict[str, Any]]:
    """Rows of a file with a ledger's name, which may be unrelated unless it was given."""
    try:
        return _rows_of_file(file)
    except DataError as error:
        if required:
            raise
        log.warning(
            "%s; it is left out. remedy: write it anew (sparsepipe.runs.ledger.gather), or move it "
            "elsewhere",
            error.message,
        )
        return []


def _finished(tree: Tree, source: Path) -> list[dict[str, Any]]:
    if not tree.rows:
        others = [f"{tree.unfinished} unfinished"] if tree.unfinished else []
        others += [f"{tree.broken} with a broken result.json"] if tree.broken else []
        kind = DataError if tree.broken else NoRunsError
        raise kind(
            f"{source} has no finished run" + (f", but {' and '.join(others)}" if others else ""),
            remedy="run the experiment (sparsepipe -m experiment=NAME), or again, which goes on "
            "with unfinished runs; or give the directory where its runs are",
        )
    return list(tree.rows.values())


def _rows_of_file(source: Path) -> list[dict[str, Any]]:
    readers = {".parquet": _read_parquet, ".csv": _read_csv}
    try:
        reader = readers.get(source.suffix.lower())
        if reader is None:
            raise ValueError("its name ends in neither .parquet nor .csv")
        reading.check_regular(source, limit_bytes=_LIMIT_BYTES)
        rows = reader(source)
    except (OSError, ValueError) as error:  # pyarrow's and pandas' own are of these
        raise _no_ledger(source, str(error).partition("\n")[0].rstrip(".")) from error
    if lacking := _NEEDED - set(rows[0] if rows else ()):
        raise _no_ledger(source, f"it has no {' and no '.join(sorted(lacking))}")
    counts = Counter(identity_text(row) for row in rows)
    if twice := [text for text, count in counts.items() if count > 1]:
        raise DataError(
            f"{source} has {twice[0]} more than once",
            remedy="write the ledger anew (sparsepipe.runs.ledger.gather)",
        )
    return rows


def _no_ledger(source: Path, why: str) -> DataError:
    return DataError(
        f"{source} is no ledger: {why}",
        remedy=f"give {PARQUET} or {CSV} of an experiment, or the directory of its runs; "
        "sparsepipe.runs.ledger.gather writes the files anew",
    )


def _read_parquet(source: Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(source).to_pylist()
    except ArrowException as error:  # some are no ValueError
        raise ValueError(error) from error
    return rows


def _read_csv(source: Path) -> list[dict[str, Any]]:
    import pandas as pd

    # As text: cells say by themselves what they are, and names are no more than the first row.
    frame = pd.read_csv(source, header=None, dtype=str, na_filter=False, skip_blank_lines=False)
    head, *rows = ([cell_value(text) for text in row] for row in frame.to_numpy().tolist())
    names = [str(name) for name in head]
    return [dict(zip(names, row, strict=True)) for row in rows]


def _chosen(
    rows: list[dict[str, Any]], key: str, value: str | None, source: Path
) -> list[dict[str, Any]]:
    """Rows with a value of a key; all rows for None. Some must have it."""
    if value is None:
        return rows
    found = [row for row in rows if row.get(key) == value]
    if not found:
        what = "experiment" if key == "name" else key
        there = sorted({str(row.get(key)) for row in rows})
        raise NoRunsError(
            f"{source} has no finished run of {what} {value!r}",
            remedy=f"choose one of {', '.join(there)}, or run what is missing",
        )
    return found
