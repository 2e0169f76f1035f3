"""Digests of files, and words for a disk that refuses."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsepipe.errors import DataError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""How a disk, a quota and a limit on a file's size say that nothing more fits."""

_UNUSABLE = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""How a directory that cannot be made, read or written to shows itself."""

_BLOCK_BYTES = 1 << 20


class UnreadableError(DataError):
    """A file that could not be read, which says nothing about what it holds."""


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """The error for a file that the system would not read just now."""
    return UnreadableError(
        f"{path} cannot be read: {error.strerror or error}",
        remedy="check its permissions, the disk and the limit on open files, then run the same "
        "command again: what is done is kept",
    )


def digest_file(path: Path) -> str:
    """Hex digest (BLAKE2b, 128 bits) of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def digest_values(values: Any) -> str:
    """Hex digest (BLAKE2b, 128 bits) of plain values: numbers, strings, lists, dicts."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def explaining_storage(directory: Path, *, setting: str) -> Iterator[None]:
    """Turn "no space left" or "permission denied" into an error that says what to do.

    Args:
        directory: what the block reads and writes.
        setting: the key that names its place.

    Raises:
        DataError: the disk, the quota or the limit on a file's size was reached; or the
            directory cannot be made, read or written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DataError(
                f"no space left in {directory}: {error.strerror}",
                remedy=f"free some space or set {setting} to a larger disk, then run the same "
                "command again: what is done is kept",
            ) from error
        if error.errno in _UNUSABLE:
            raise DataError(
                f"cannot use {directory}: {error.strerror} ({error.filename})",
                remedy=f"grant permission to it, or set {setting} to a directory that you can "
                "read and write",
            ) from error
        raise
