"""Atomic writes and locks between processes.

A write goes to a temporary file beside the target, is flushed to disk, and is renamed over the
target: a reader, and whoever comes after a killed process, finds either the old content or the new.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_POLL_S = 0.1


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block ends well.

    When the block raises, ``path`` is left as it was and no temporary file remains. What the
    disk refuses is the caller's to explain.

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


def write_json(path: Path, values: Any) -> None:
    """Write plain values as JSON, whole or not at all."""
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
