"""Files of a data set: digests, locks and error messages of the file system."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sparsepipe.errors import DataError
from sparsepipe.utils import reading
from sparsepipe.utils.files import LockHeldError, file_lock, replacing, write_plain_json
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.progress import progress

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, an exceeded quota and a limit on a file's size."""
_UNUSABLE = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""Errors of a directory that cannot be created, read or written to."""


LOCK_WAIT_S = 7_200.0
"""How long to wait for another process that builds the same cache."""
_LOG = logging.getLogger(__name__)

FOUND = logging.getLogger(f"{__name__}.found")
"""Logger of what was found in users' data; ranks leave that to the process that starts them."""


@cache
def log_once(message: str) -> None:
    """Log what was found in users' data, once in this process, which may open it repeatedly."""
    FOUND.info(message)


class UnreadableError(DataError):
    """A file that could not be read, although its content may be valid."""


class MissingFileError(UnreadableError):
    """A file that does not exist."""


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """The error for a file that the operating system failed to read."""
    return UnreadableError(
        f"{path} cannot be read: {error.strerror or error}",
        remedy="check its permissions, the disk and the limit on open files, then run the same "
        "command again",
    )


def check_regular(path: Path, *, limit_bytes: int | None = None) -> None:
    """Require a regular file of data, see :func:`sparsepipe.utils.reading.check_regular`.

    Raises:
        DataError: the file is missing, not regular, or larger than the limit.
    """
    try:
        reading.check_regular(path, limit_bytes=limit_bytes)
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{path} does not exist", remedy="check the path and the root of the data"
        ) from error
    except OSError as error:
        if error.errno:
            raise unreadable(path, error) from error
        smaller = "a smaller file (a cloud takes less room as .npy than as text)"
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            remedy=f"replace it by {smaller if path.is_file() else 'a file that holds the data'}, "
            "or remove it",
        ) from error


SHAPE_BYTES = 1 << 30
"""Limit of a file that is read as one shape: a larger one is hardly an object to classify."""
LIST_BYTES = 1 << 26
"""Limit of a file that names the files of a data set."""


def read_text(path: Path, *, limit_bytes: int) -> str:
    """A text file in UTF-8, such as a list of files.

    Raises:
        DataError: it is missing, not regular, larger than the limit, or not text.
    """
    check_regular(path, limit_bytes=limit_bytes)
    try:
        return reading.read_text(path, limit_bytes=limit_bytes)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise DataError(
            f"{path} cannot be read: {error}", remedy="write it as text, or copy it again"
        ) from error


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
    """Turn "no space left" or "permission denied" in the block into an error with a remedy.

    ``setting`` is the configuration key of the directory.

    Raises:
        DataError: the disk is full, a quota or limit on a file's size is exceeded, or the
            directory cannot be created, read or written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DataError(
                f"no space left in {directory}: {error.strerror}",
                remedy=f"free some space or set {setting} to a larger disk, then run the same "
                "command again",
            ) from error
        if error.errno in _UNUSABLE:
            raise DataError(
                f"cannot use {directory}: {error.strerror} ({error.filename})",
                remedy=f"grant permission to it, or set {setting} to a directory that you can "
                "read and write",
            ) from error
        raise


@contextmanager
def new_array(
    path: Path, *, dtype: str | np.dtype[Any], shape: Sequence[int], fortran_order: bool = False
) -> Iterator[NDArray[Any]]:
    """A new ``.npy`` file, memory-mapped to be filled piece by piece.

    The file appears when the block ends well. Its space is allocated first, because on a full disk
    a write through a memory map would kill the process. The caller holds a lock of this file: what
    killed processes have left of it is removed.

    Args:
        path: the file; its folder is made if it is missing.
        dtype: numpy type of the values.
        shape: of the array.
        fortran_order: store the first dimension's positions beside each other, not the last one's.

    Raises:
        DataError: there is too little space.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    needed = math.prod(shape) * np.dtype(dtype).itemsize
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise DataError(
            f"the cache in {path.parent} needs {needed / 2**20:,.1f} MiB more, but "
            f"{free / 2**20:,.1f} MiB are free",
            remedy="free some space or set data.cache_dir to a larger disk, then run the same "
            "command again",
        )
    with replacing(path) as temporary:
        array = npy.open_memmap(
            temporary, mode="w+", dtype=dtype, shape=tuple(shape), fortran_order=fortran_order
        )
        with temporary.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        yield array
        array.flush()


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs.

    Args:
        path: lock file in the folder of the cache. It is never deleted; its presence does not
            mean that the lock is held.
        wait_s: how long to wait for another process that holds it.

    Raises:
        DataError: another process still held the lock after ``wait_s``.
    """
    with ExitStack() as held:
        try:
            tell = partial(_LOG.info, "waiting for another process that builds %s", path.parent)
            held.enter_context(file_lock(path, wait_s=wait_s, on_wait=tell))
        except LockHeldError:
            raise DataError(
                f"another process has been building the cache {path.parent} for longer than "
                f"{wait_s:g} s",
                remedy="wait for it and run the same command again, raise data.lock_wait_s, or "
                "end that process",
            ) from None
        yield


@dataclass(frozen=True, slots=True)
class ShapeFile:
    """One file of a shape.

    Attributes:
        name: path relative to the root, with forward slashes.
        path: location of the file.
        size_bytes: size; -1 if the file is missing or not regular.
        digest: hex digest of the content, or ``missing``.
    """

    name: str
    path: Path
    size_bytes: int
    digest: str


def scan_files(root: Path, names: Sequence[str], *, cache_directory: Path) -> list[ShapeFile]:
    """Sizes and digests of files under ``root``, in the order of ``names``.

    Digests are kept in a manifest, so that files of the same size and time are not read again.

    Raises:
        DataError: an existing file cannot be read, or the manifest cannot be written.
    """
    manifest = cache_directory / "manifests" / f"{digest_values(str(root))}.json"
    try:
        known: dict[str, list[Any]] = json.loads(manifest.read_text())  # size, time in ns, digest
    except (OSError, ValueError):
        known = {}
    found = dict[str, tuple[int, int]]()
    for name in names:
        with suppress(FileNotFoundError), _readable(root / name):
            status = (root / name).stat()
            if stat.S_ISREG(status.st_mode):  # to read a pipe or a device might never end
                found[name] = status.st_size, status.st_mtime_ns
    stale = [name for name in found if (*known.get(name, [])[:2],) != found[name]]

    def digest(name: str) -> str:
        with _readable(root / name):
            return digest_file(root / name)

    if stale:
        # The disk is the bottleneck, so that more threads than cores keep it busy.
        with ThreadPoolExecutor(2 * usable_cores()) as pool, progress("reading files") as advance:
            for name, value in zip(stale, pool.map(digest, stale), strict=True):
                known[name] = [*found[name], value]
                advance(len(stale))
        with explaining_storage(cache_directory, setting="data.cache_dir"):
            write_plain_json(manifest, known)
    return [
        ShapeFile(name, root / name, found[name][0], known[name][2])
        if name in found
        else ShapeFile(name, root / name, -1, "missing")
        for name in names
    ]


def digest_listing(files: Sequence[ShapeFile]) -> str:
    """Digest of names, sizes and contents."""
    return digest_values([[file.name, file.size_bytes, file.digest] for file in files])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def check_class_names(classes: Sequence[str], where: Path) -> None:
    """Raise ``DataError`` for names that are not Unicode text, since results could not be written.

    Args:
        classes: names; those of folders in another encoding contain surrogates.
        where: the file or folder that they are from.
    """
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has a class of the name {name!a}, which is not text in UTF-8",
                remedy="give it another name",
            ) from error
