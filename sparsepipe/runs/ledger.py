"""The ledger: the results of many runs as one table, in memory and as files.

:func:`load_results` is the one way to read results, from a tree of run directories or from a
ledger's file; :func:`gather` writes the ledger of an experiment. Only finished runs are in it, and
none of ``task=report``, which has no figures of its own.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.runs.ledger_table import Row, cell_text, cell_value, frame_of, rows_of
from sparsepipe.runs.run_tree import Tree, identity_text, read_tree
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
"""Size of a ledger's file at most: a run takes a few kilobytes."""
_LIMIT_S = 60.0
"""How long to wait for another process: a ledger of thousands of runs takes seconds."""
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
        NoRunsError: no such file or directory exists, no finished run in it or none of that
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

    Each appears whole or not at all, and in the same rows and columns whenever it is written.
    Processes that write a ledger at the same time wait for each other, so that the last one has all
    rows.

    Args:
        experiment_dir: the directory of the runs.
        to: the directory of the files; None: beside the runs.

    Returns:
        The table, as :func:`load_results` reads it from either file.

    Raises:
        DataError: no finished run exists, one is there twice, a file cannot be written, or
            another process has been writing them for a minute.
    """
    source = expanded(experiment_dir)
    if not source.is_dir():
        raise DataError(
            f"there is no directory {source}",
            remedy="give the directory of an experiment's runs, such as outputs/demo",
        )
    directory = source if to is None else expanded(to)
    with explained_errors(directory), ExitStack() as held:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with suppress(OSError, NotImplementedError):  # a file system without locks
                held.enter_context(file_lock(directory / LOCK, wait_s=_LIMIT_S))
        except LockHeldError:
            raise DataError(
                f"another process has been writing the ledger in {directory} for {_LIMIT_S:g} s",
                remedy="end it, then write the ledger anew (sparsepipe.runs.ledger.gather)",
            ) from None
        tree = read_tree(source)  # what others finish meanwhile, they write after this
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
    """Rows of a tree of runs, and of ledgers in directories without runs."""
    if not source.is_dir():
        raise NoRunsError(
            f"directory {source} not found",
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
                "%s; it is left out. remedy: write it anew (sparsepipe.runs.ledger.gather), or "
                "move it elsewhere",
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
    """The error of a directory without finished runs."""
    counts = {"unfinished": tree.unfinished, "with a broken result.json": tree.broken}
    others = [
        f"{number} {what}"
        for what, paths in counts.items()
        if (number := sum(path.is_relative_to(source) for path in paths))
    ]
    return (DataError if tree.broken else NoRunsError)(
        f"{source} has no finished run" + (f", but {' and '.join(others)}" if others else ""),
        remedy="run the experiment (sparsepipe -m experiment=NAME), or again, which goes on "
        "with unfinished runs; or give the directory where its runs are",
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
                # As text: cells say by themselves what they are, and names are the first row.
                frame = pd.read_csv(
                    source, header=None, dtype=str, na_filter=False, skip_blank_lines=False
                )
                head, *cells = [list(map(cell_value, row)) for row in frame.to_numpy().tolist()]
                rows = [dict(zip(map(str, head), row, strict=True)) for row in cells]
        except ArrowException as error:  # some are no ValueError
            raise ValueError(str(error).partition("\n")[0]) from error
        if lacking := _NEEDED - set(rows[0] if rows else ()):
            raise ValueError(f"it has no {' and no '.join(sorted(lacking))}")
        counts = Counter(identity_text(row) for row in rows)
        if twice := [text for text, count in counts.items() if count > 1]:
            raise ValueError(f"it has {twice[0]} more than once")
    return rows


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
