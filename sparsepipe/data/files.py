"""Files of a data set: digests, locks, and errors of the file system with remedies."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sparsepipe.errors import DataError
from sparsepipe.utils import reading
from sparsepipe.utils.files import LockHeldError, expanded, file_lock, replacing, write_plain_json
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.progress import progress

LOCK_WAIT_S = 7_200.0
"""Seconds to wait for another process that builds the same cache."""
_LOG = logging.getLogger(__name__)

FOUND = logging.getLogger(f"{__name__}.found")
"""Logger of findings in users' data; disabled in ranks, whose parent process has logged them."""


@cache
def log_once(message: str, *, level: int = logging.INFO) -> None:
    """Logs a finding in users' data once per process, even if the data are opened repeatedly."""
    FOUND.log(level, message)


class UnreadableError(DataError):
    """The error for a file that cannot be read although its content may be valid."""


def unreadable(path: Path, error: OSError) -> DataError:
    """Returns an UnreadableError, or a DataError if a file is missing, not regular or too big."""
    kind = DataError if error.errno in (None, errno.ENOENT) else UnreadableError
    return kind(
        f"{path} cannot be read: {error.strerror or error}",
        remedy="check the path, its permissions and the disk, or replace it with a valid file",
    )


def check_regular(path: Path, *, limit_bytes: int | None = None) -> None:
    """Raises a DataError unless ``path`` is a regular file of at most ``limit_bytes``, if given."""
    try:
        reading.check_regular(path, limit_bytes=limit_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def explaining_file(path: Path, *, what: str, extra: str, remedy: str) -> Iterator[None]:
    """Turns errors of the block, which reads a user's file, into a DataError that names it.

    If a package is missing, that is an UnreadableError.

    Args:
        path: the file.
        what: what is wrong with it, such as "is not a valid scene".
        extra: the extra of this package that installs what reads such files.
        remedy: remedy of the error, except for packages that are missing.
    """
    try:
        yield
    except (DataError, MemoryError):
        raise
    except ImportError as error:
        raise UnreadableError(
            f"{path} needs the package {error.name}: {error}",
            remedy=f"run pip install 'sparsepipe[{extra}]', or convert the file to another format",
        ) from error
    except Exception as error:  # each library raises its own types
        if isinstance(error, OSError) and error.errno:
            raise unreadable(path, error) from error
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} {what}: {why}", remedy=remedy) from error


def require_root(root: Path | str | None, *, what: str, where_from: str) -> Path:
    """Returns the absolute path of ``data.root``; raises a DataError if it is not a directory.

    For its message, ``what`` says what the directory should be, ``where_from`` how to obtain it.
    """
    path = expanded(root or ".").absolute()
    if not root or not path.is_dir():
        raise DataError(
            f"data.root={root or 'null'} is not a directory; it should be {what}",
            remedy=f"set data.root=/path/to/it; {where_from}",
        )
    return path


def digest_file(path: Path) -> str:
    """Hex digest (BLAKE2b, 128 bits) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


def digest_values(values: Any) -> str:
    """Hex digest (BLAKE2b, 128 bits) of plain values: numbers, strings, lists, dicts."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def explaining_storage(directory: Path, *, setting: str) -> Iterator[None]:
    """Turns an OSError of the block into a DataError that names the directory and its setting."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot use {directory}: {error.strerror or error} ({error.filename})",
            remedy=f"free space and check permissions there, or set {setting} to another "
            "directory, then run the same command again",
        ) from error


@contextmanager
def new_array(
    path: Path, *, dtype: str | np.dtype[Any], shape: Sequence[int]
) -> Iterator[NDArray[Any]]:
    """Yields the memory-mapped array of a new ``.npy`` file, which the block fills.

    The file appears when the block ends without an error. Its space is allocated first, because on
    a full disk a write through a memory map would kill the process. The caller must hold a lock on
    ``path``, because its temporary files that killed processes left behind are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    with replacing(path) as temporary:
        array = npy.open_memmap(temporary, mode="w+", dtype=dtype, shape=tuple(shape))
        with temporary.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        yield array
        array.flush()


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[None]:
    """Holds the lock file ``path`` in the block; raises a DataError after waiting ``wait_s``."""
    tell = partial(_LOG.info, "waiting for another process that builds %s", path.parent)
    try:
        with file_lock(path, wait_s=wait_s, on_wait=tell):
            yield
    except LockHeldError:
        raise DataError(
            f"another process has been building {path.parent} for longer than {wait_s:g} s",
            remedy="wait for it and run the same command again, end that process, or raise "
            "data.lock_wait_s if the data have this setting",
        ) from None


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a data set; ``name`` is the one given to ``scan_files``.

    If the file is missing or not regular, its size is -1 and its digest ``missing``.
    """

    name: str
    path: Path
    size_bytes: int
    digest: str


def scan_files(root: Path, names: Sequence[str], *, cache_directory: Path) -> list[DataFile]:
    """Returns the files ``names``, relative to ``root``, in this order, with sizes and digests.

    The cache keeps digests: files of unchanged size and modification time are not read again.
    """
    manifest = cache_directory / "manifests" / f"{digest_values(str(root))}.json"
    try:
        known: dict[str, list[Any]] = json.loads(manifest.read_text())  # bytes, mtime in ns, digest
    except (OSError, ValueError):
        known = {}
    found = dict[str, tuple[int, int]]()
    for name in names:
        with explaining_storage(root, setting="data.root"), suppress(FileNotFoundError):
            status = (root / name).stat()
            if stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
                found[name] = status.st_size, status.st_mtime_ns
    stale = [name for name in found if (*known.get(name, [])[:2],) != found[name]]
    if stale:
        # The disk is the bottleneck, and more threads than cores keep it busy.
        with (
            explaining_storage(root, setting="data.root"),
            ThreadPoolExecutor(2 * usable_cores()) as pool,
            progress("reading files") as advance,
        ):
            digests = pool.map(lambda name: digest_file(root / name), stale)
            for name, value in zip(stale, digests, strict=True):
                known[name] = [*found[name], value]
                advance(len(stale))
        with explaining_storage(cache_directory, setting="data.cache_dir"):
            write_plain_json(manifest, known)
    return [
        DataFile(name, root / name, found[name][0], known[name][2])
        if name in found
        else DataFile(name, root / name, -1, "missing")
        for name in names
    ]


def digest_listing(files: Sequence[DataFile]) -> str:
    """Hex digest of the files' names, sizes and contents."""
    return digest_values([[file.name, file.size_bytes, file.digest] for file in files])
