"""Atomic writes, files that cannot be read or written, and locks between processes.

A write goes to a temporary file beside the target, is flushed to disk, and is renamed over the
target: readers, also after a process was killed, find either the old content or the new.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sparsepipe.errors import DataError, OutputError
from sparsepipe.utils import reading

PathLike = str | os.PathLike[str]

_POLL_S = 0.1


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well.

    When the block raises, ``path`` is left as it was and no temporary file remains. The
    caller explains errors of the file system.

    Args:
        path: the file; its folder is made if it is missing.
        durable: have the bytes on the disk first, so that a power failure leaves the file
            whole or absent, not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):  # the reason why the block failed matters more
            temporary.unlink(missing_ok=True)


def free_name(path: Path) -> Path:
    """The path, or the first of ``path.1``, ``path.2``, ... that nothing has."""
    numbered = (path.with_name(f"{path.name}.{k}") for k in itertools.count(1))
    return next(each for each in itertools.chain([path], numbered) if not os.path.lexists(each))


def write_plain_json(path: Path, values: Any) -> None:
    """Writes values of JSON's own types, whole or not at all.

    The caller explains errors of the file system.
    """
    text = json.dumps(values, indent=2, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="ascii")


class LockHeldError(Exception):
    """Another process holds a lock, and did so for as long as this one may wait."""


@contextmanager
def file_lock(
    path: Path, *, wait_s: float = 0.0, on_wait: Callable[[], object] | None = None
) -> Iterator[None]:
    """Hold an exclusive lock between processes while the block runs.

    The operating system releases the lock when its process ends, however it ends. The file stays.

    Args:
        path: the lock file; its folder is made if it is missing.
        wait_s: how long to wait for another process that holds the lock.
        on_wait: called once, before waiting for another process.

    Raises:
        LockHeldError: another process still held the lock after ``wait_s``.
        OSError: the file cannot be made or locked.
    """
    from filelock import FileLock, Timeout  # costs start-up time that few commands need

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
def atomic_writer(path: PathLike) -> Iterator[BinaryIO]:
    """Opens ``path`` for writing bytes; the file appears when the block ends well.

    When the block raises, ``path`` is left as it was and no temporary file remains.
    Missing parent directories are made.

    Raises:
        DataError: the file cannot be written (permissions, disk full).
    """
    target = Path(path)
    with explained_errors(target), replacing(target) as temporary, temporary.open("wb") as stream:
        yield stream


def write_bytes_atomic(path: PathLike, content: bytes) -> Path:
    """Writes ``content`` to ``path`` atomically and returns the path."""
    with atomic_writer(path) as stream:
        stream.write(content)
    return Path(path)


def write_text_atomic(path: PathLike, text: str) -> Path:
    """Writes ``text`` as UTF-8 to ``path`` atomically and returns the path.

    Half characters, as in names of folders that are not UTF-8, are written by
    their numbers.
    """
    return write_bytes_atomic(path, text.encode("utf-8", "backslashreplace"))


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
    with explained_errors(target):
        write_plain_json(target, plain)
    return target


_ANEW = (
    "Remove the file, and DONE.json beside it where there is one, and run again: it will be "
    "written anew."
)


def read_json(path: PathLike) -> Any:
    """Reads a JSON file.

    Raises:
        DataError: the file is missing, no regular one, or not JSON with finite numbers.
    """
    source = Path(path)
    try:
        return reading.parse_json(reading.read_text(source))
    except OSError as error:
        raise DataError(
            f"{source} cannot be read: {error.strerror or error}",
            remedy="Check the path; a run writes this file when it gets that far.",
        ) from error
    except ValueError as error:
        raise DataError(
            f"{source} cannot be read: {error}",
            remedy=_ANEW,
        ) from error


def read_mapping(path: PathLike, **needed: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Reads a JSON file that holds a mapping.

    Args:
        path: the file.
        needed: keys that it must have, and what checks the value of each, such as
            :func:`sparsepipe.utils.reading.amount`.

    Raises:
        DataError: see :func:`read_json`; or it holds no mapping, or one without such values.
    """
    found = read_json(path)
    try:
        values = dict(reading.mapping(found, "the whole"))
        for key, check in needed.items():
            check(values.get(key), f"'{key}'")
    except ValueError as error:
        raise DataError(
            f"{path} does not hold what a run writes there: {error}",
            remedy=_ANEW,
        ) from error
    return values


@contextmanager
def explained_errors(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one with a remedy."""
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


def expanded(path: PathLike) -> Path:
    """The path that is meant, with ``~`` and environment variables filled in."""
    return Path(os.path.expanduser(os.path.expandvars(path)))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names ``path`` and the remedy when the block cannot write there.

    Raises:
        OutputError: no permission, no space, or no directory.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror or error}",
            remedy="free space and check permissions there, or set paths.outputs to another "
            "directory",
        ) from error
