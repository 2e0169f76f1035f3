"""The ledger: the results of many runs as one table, in memory and as files.

:func:`load_results` is the one way to read results, from a tree of run directories or from a
ledger's file; :func:`gather` writes the ledger of an experiment. Only finished runs are in it, and
none of ``task=report``, which has no figures of its own.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsepipe.errors import DataError, NoRunsError
from sparsepipe.results.cells import Row, cell_text, cell_value, frame_of, rows_of
from sparsepipe.results.files import PathLike, write_bytes_atomic
from sparsepipe.results.run_tree import Tree, identity_text, read_tree
from sparsepipe.results.tables import write_csv

if TYPE_CHECKING:  # takes a second to import, and most who import this room read no ledger
    import pandas as pd

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
            CSV), or a directory that has one and no runs. ``~`` and environment variables count.
        experiment: only its runs: those below the directory of this name, else those whose
            ``name`` it is.
        kind: only runs of this kind.

    Raises:
        NoRunsError: there is no such file or directory, no finished run in it or none that is asked
            for.
        DataError: runs that are there cannot be read, a file is no ledger, or a run is there twice.
    """
    source = _meant(where)
    below = source if experiment is None else source / experiment
    if experiment is not None and below.is_dir():
        rows = _rows(below)
    else:
        rows = _chosen(_rows(source), "name", experiment, source)
    return _table(_chosen(rows, "kind", kind, source))


def gather(experiment_dir: PathLike, *, to: PathLike | None = None) -> pd.DataFrame:
    """Writes ``ledger.parquet`` and ``ledger.csv`` of all finished runs of an experiment.

    Each appears whole or not at all, and in the same rows and columns whenever it is written.

    Args:
        experiment_dir: the directory of the runs.
        to: the directory of the files; None: beside the runs.

    Returns:
        The table, as :func:`load_results` reads it from either file.

    Raises:
        DataError: there is no finished run, one is there twice, or a file cannot be written.
    """
    source = _meant(experiment_dir)
    frame = _table(_rows_of_runs(source))
    directory = source if to is None else _meant(to)
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


def _meant(path: PathLike) -> Path:
    return Path(os.path.expandvars(os.fspath(path))).expanduser()


def _table(rows: Iterable[Row]) -> pd.DataFrame:
    return frame_of(sorted(rows, key=lambda row: (str(row.get("name")), str(row["run_id"]))))


def _rows(source: Path) -> list[dict[str, Any]]:
    """Of a ledger's file, of a tree of runs, or of the ledger in a directory without runs."""
    if source.is_file():
        return _rows_of_file(source)
    if not source.is_dir():
        raise NoRunsError(
            f"there is no {source}",
            remedy="give the directory that runs are written to (paths.outputs, outputs by "
            "default), one of its experiments, or a ledger's file",
        )
    tree = read_tree(source)
    if not tree.rows and not tree.broken:
        for name in (PARQUET, CSV):
            if (source / name).is_file():
                return _rows_of_file(source / name)
    return _finished(tree, source)


def _rows_of_runs(source: Path) -> list[dict[str, Any]]:
    if not source.is_dir():
        raise DataError(
            f"there is no directory {source}",
            remedy="give the directory of an experiment's runs, such as outputs/demo",
        )
    return _finished(read_tree(source), source)


def _finished(tree: Tree, source: Path) -> list[dict[str, Any]]:
    if not tree.rows:
        told = [f"{tree.unfinished} unfinished"] if tree.unfinished else []
        told += [f"{tree.broken} with a broken result.json"] if tree.broken else []
        kind = DataError if tree.broken else NoRunsError
        raise kind(
            f"{source} has no finished run" + (f", but {' and '.join(told)}" if told else ""),
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
        rows = reader(source)
    except (OSError, ValueError) as error:  # pyarrow's and pandas' own are of these
        raise _no_ledger(source, str(error).partition("\n")[0]) from error
    if lacking := _NEEDED - set(rows[0] if rows else ()):
        raise _no_ledger(source, f"it has no {' and no '.join(sorted(lacking))}")
    counts = Counter(identity_text(row) for row in rows)
    if twice := [text for text, count in counts.items() if count > 1]:
        raise DataError(
            f"{source} has {twice[0]} more than once",
            remedy="write the ledger anew (sparsepipe.results.gather)",
        )
    return rows


def _no_ledger(source: Path, why: str) -> DataError:
    return DataError(
        f"{source} is no ledger: {why}",
        remedy=f"give {PARQUET} or {CSV} of an experiment, or the directory of its runs; "
        "sparsepipe.results.gather writes the files anew",
    )


def _read_parquet(source: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(source).to_pylist()
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
    """Rows with a value, which some must have; all where none is asked for."""
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
