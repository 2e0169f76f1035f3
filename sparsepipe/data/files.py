"""Files that appear whole or not at all, and digests of what they hold."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well.

    Args:
        path: the file; its folder is made if it is missing.
        durable: have the bytes on the disk first, so that a power failure leaves the file
            whole or absent, not empty.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
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


def write_json(path: Path, values: Any) -> None:
    """Write plain values as JSON, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1) + "\n")


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
