"""Files that are written completely or not at all, locks between processes, JSON, CSV, tables.

A write goes to a temporary file in the target's folder, is flushed to disk, and is renamed to the
target, so that readers find the old content or the new, even after a process was killed.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsepipe.errors import ConfigError, DataError, OutputError, SparsePipeError
from sparsepipe.utils import reading

PathLike = str | os.PathLike[str]

_POLL_S = 0.1
_NUMBER = re.compile(r"[+-]?(\d[\d,]*\.?\d*|\.\d+)(e[+-]?\d+)?\s?[%x]?", re.IGNORECASE)
_ANEW = (
    "remove the file, and DONE.json next to it if that exists; then repeat the run, which writes "
    "the file again"
)


def expanded(path: PathLike) -> Path:
    """Returns the path with ``~`` and environment variables expanded; a ConfigError if it is empty,
    which would mean the working directory.
    """
    if not os.fspath(path):
        raise ConfigError(
            "an empty path cannot be read or written",
            remedy="name a file or directory, such as '.' for the working directory; a variable of "
            "the shell that is not set leaves a setting empty",
        )
    return Path(os.path.expanduser(os.path.expandvars(path)))


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yields a temporary path, and renames that file to ``path`` if the block raises no error.

    If the block raises one, ``path`` stays as it was, and the temporary file is removed. Errors of
    the file system stay OSErrors.

    Args:
        path: the file; its folder is made if it is missing.
        durable: whether to flush the bytes to disk first, so that a power failure leaves the old
            file or the new one, not an empty one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):  # the block's own error matters more
            temporary.unlink(missing_ok=True)


def free_name(path: Path) -> Path:
    """Returns the first of ``path``, ``path.1``, ``path.2``, ... that does not exist."""
    numbered = (path.with_name(f"{path.name}.{k}") for k in itertools.count(1))
    return next(each for each in itertools.chain([path], numbered) if not os.path.lexists(each))


def write_plain_json(path: Path, values: Any) -> None:
    """Writes values of JSON's own types to ``path``, completely or not at all.

    Errors of the file system stay OSErrors.
    """
    text = json.dumps(values, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="ascii")


class LockHeldError(Exception):
    """Another process still held the lock when the time to wait for it was over."""


@contextmanager
def file_lock(
    path: Path, *, wait_s: float = 0.0, on_wait: Callable[[], object] | None = None
) -> Iterator[None]:
    """Holds a lock that excludes other processes while the block runs, or raises a LockHeldError.

    The system releases the lock when the process ends, however it ends. The lock file remains.

    Args:
        path: the lock file; its folder is made if it is missing.
        wait_s: seconds to wait for another process that holds the lock.
        on_wait: called once, before waiting for another process.
    """
    from filelock import FileLock, Timeout  # slow to import, and few commands lock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if on_wait is not None:
            on_wait()
        try:
            lock.acquire(timeout=wait_s, poll_interval=_POLL_S)
        except Timeout:
            raise LockHeldError(str(path)) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(path: Path, *, error: type[SparsePipeError] = OutputError) -> Iterator[None]:
    """Turns an OSError of the block into an ``error`` that names ``path`` and a remedy."""
    try:
        yield
    except OSError as problem:
        raise error(
            f"{path} cannot be written: {problem.strerror or problem}",
            remedy="free space and check permissions there, or, for files of a run, set "
            "paths.outputs to another directory",
        ) from problem


def write_bytes_atomic(path: PathLike, content: bytes) -> Path:
    """Writes ``content`` to ``path`` atomically and returns the path; raises a DataError if it
    cannot be written.
    """
    target = Path(path)
    with writing(target, error=DataError), replacing(target) as temporary:
        temporary.write_bytes(content)
    return target


def write_text_atomic(path: PathLike, text: str) -> Path:
    """Writes text as UTF-8 with :func:`write_bytes_atomic`; lone surrogates become escapes."""
    return write_bytes_atomic(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: PathLike, value: Any) -> Path:
    """Writes ``value`` as indented JSON to ``path`` atomically and returns the path.

    Besides JSON's own types, numpy and torch scalars and arrays (anything with ``tolist``), paths,
    sets, mappings and dataclasses are written as their plain counterparts. Numbers that are not
    finite become ``null``, since JSON has none.
    """
    plain, target = _plain_json(value), Path(path)
    with writing(target, error=DataError):
        write_plain_json(target, plain)
    return target


def _plain_json(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            plain: Any = value
        case float():
            plain = value if math.isfinite(value) else None
        case Mapping():
            plain = {str(_plain_json(key)): _plain_json(item) for key, item in value.items()}
        case list() | tuple():
            plain = [_plain_json(item) for item in value]
        case set() | frozenset():
            plain = sorted(map(_plain_json, value), key=repr)
        case os.PathLike():
            plain = os.fspath(value)
        case _ if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            plain = {name: _plain_json(getattr(value, name)) for name in names}
        case _ if callable(getattr(value, "tolist", None)):  # numpy and torch, scalars and arrays
            plain = _plain_json(value.tolist())
        case _:
            raise TypeError(f"{type(value).__name__} has no JSON counterpart: {value!r}")
    return plain


def read_json(path: PathLike) -> Any:
    """Reads a JSON file; raises a DataError if it is missing, not a regular file, or not JSON."""
    source = Path(path)
    try:
        return reading.parse_json(reading.read_text(source))
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror or error}",
            remedy="check the path and permissions; a run that ended early may lack this file",
        ) from error
    except ValueError as error:
        raise DataError(f"{source} cannot be read: {error}", remedy=_ANEW) from error


def read_mapping(path: PathLike, **needed: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping; raises a DataError if it does not.

    Args:
        path: the file.
        needed: required keys, each with a function that checks its value, such as
            :func:`sparsepipe.utils.reading.amount`.
    """
    found = read_json(path)
    try:
        values = dict(reading.mapping(found, "its content"))
        for key, check in needed.items():
            check(values.get(key), f"'{key}'")
    except ValueError as error:
        raise DataError(
            f"{path} does not hold what a run writes there: {error}", remedy=_ANEW
        ) from error
    return values


def write_csv(path: PathLike, rows: Sequence[Mapping[str, Any]]) -> Path:
    r"""Writes rows with the same keys as CSV in UTF-8, atomically, and returns the path.

    Bytes of file names that are not UTF-8 are written as escapes such as ``\udcff``.
    """
    if not rows:
        raise ValueError("there are no rows, whose keys would be the columns of the table")
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return write_bytes_atomic(path, stream.getvalue().encode("utf-8", "backslashreplace"))


def read_csv(path: PathLike, *needed: str) -> list[dict[str, str]]:
    """Reads the rows of a CSV file with a header; cells stay text, missing cells become empty text.

    Args:
        path: the file.
        needed: names of columns that the file must have; a ValueError names those that it lacks.
    """
    text = reading.read_text(path)
    try:
        table = csv.DictReader(io.StringIO(text, newline=""))
        rows = [{name: cell or "" for name, cell in row.items() if name} for row in table]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if lacking := [name for name in needed if name not in (table.fieldnames or ())]:
        raise ValueError(f"it has no column {' or '.join(lacking)}")
    return rows


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table whose columns of numbers are aligned to the right, others left.

    Args:
        head: names of the columns.
        rows: for each row, its cells, one for each column.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(3, *map(len, column)) for column in columns]
    right = [
        all(cell.strip() in ("", "-") or _NUMBER.fullmatch(cell.strip()) for cell in column[1:])
        for column in columns
    ]
    rule = [
        "-" * (width - 1) + ":" if to_right else "-" * width
        for width, to_right in zip(widths, right, strict=True)
    ]
    lines = []
    for cells in (head, rule, *rows):
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)
