"""Files that appear whole or not at all, and digests of what they hold."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsepipe.errors import DataError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""How a disk, a quota and a limit on a file's size say that nothing more fits."""

_BLOCK_BYTES = 1 << 20


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
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """Write plain values as JSON, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1) + "\n")


@contextmanager
def explaining_full_disk(directory: Path) -> Iterator[None]:
    """Turn "no space left" inside the block into an error that says what to do.

    Raises:
        DataError: the disk, the quota or the limit on a file's size was reached.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DataError(
            f"no space left for the cache in {directory}: {error.strerror}",
            remedy="free some space or set data.cache_dir to a larger disk, then run the "
            "same command again: what is cached already is kept",
        ) from error
