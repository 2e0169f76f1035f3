"""A run's files: they appear whole or not at all, and who writes them hears why not."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sparsepipe.errors import DataError
from sparsepipe.utils import files
from sparsepipe.utils.files import replacing

PathLike = str | os.PathLike[str]


@contextmanager
def atomic_writer(path: PathLike) -> Iterator[BinaryIO]:
    """Opens ``path`` for writing bytes; the file appears when the block ends well.

    When the block raises, ``path`` is left as it was and no temporary file remains.
    Missing parent directories are made.

    Raises:
        DataError: the file cannot be written (permissions, disk full).
    """
    target = Path(path)
    with explained(target), replacing(target) as temporary, temporary.open("wb") as stream:
        yield stream


def write_bytes_atomic(path: PathLike, content: bytes) -> Path:
    """Writes ``content`` to ``path`` atomically and returns the path."""
    with atomic_writer(path) as stream:
        stream.write(content)
    return Path(path)


def write_text_atomic(path: PathLike, text: str) -> Path:
    """Writes ``text`` as UTF-8 to ``path`` atomically and returns the path."""
    return write_bytes_atomic(path, text.encode("utf-8"))


def write_json(path: PathLike, value: Any) -> Path:
    """Writes ``value`` as indented JSON to ``path`` atomically and returns the path.

    Beside JSON's own types, numpy and torch scalars and arrays (anything with
    ``tolist``), paths, sets, mappings and dataclasses are written as their plain
    counterparts. Numbers that are not finite become ``null``, since JSON has none.

    Raises:
        TypeError: ``value`` holds something with no plain counterpart.
        DataError: the file cannot be written.
    """
    plain, target = _plain(value), Path(path)
    with explained(target):
        files.write_json(target, plain)
    return target


def read_json(path: PathLike) -> Any:
    """Reads a JSON file.

    Raises:
        DataError: the file is missing, unreadable or not JSON.
    """
    source = Path(path)
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror or error}",
            remedy="Check the path; a run writes this file when it gets that far.",
        ) from error
    except ValueError as error:
        raise DataError(
            f"{source} is not valid JSON: {error}",
            remedy="Remove the file and run again, it will be written anew.",
        ) from error


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns what the disk refuses into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}",
            remedy="Check permissions and free space there, or choose another output directory.",
        ) from error


_PLAIN: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    ((type(None), bool, int, str), lambda value: value),
    (float, lambda value: value if math.isfinite(value) else None),
    (Mapping, lambda value: {_plain_key(key): _plain(item) for key, item in value.items()}),
    ((list, tuple), lambda value: [_plain(item) for item in value]),
    ((set, frozenset), lambda value: sorted(map(_plain, value), key=repr)),
    (os.PathLike, os.fspath),
)


def _plain(value: Any) -> Any:
    for kinds, convert in _PLAIN:
        if isinstance(value, kinds):
            return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if callable(getattr(value, "tolist", None)):  # numpy and torch, scalars and arrays
        return _plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON counterpart: {value!r}")


def _plain_key(key: Any) -> str:
    return key if isinstance(key, str) else str(_plain(key))
