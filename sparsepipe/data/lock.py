"""One builder at a time, across processes; a lock dies with the process that holds it."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsepipe.aside import Aside, aside
from sparsepipe.errors import DataError

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1
_TELL_AFTER_S = 3.0
"""Ranks of one run wait for one another for shorter than this: nothing to tell."""


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs.

    Neither the wait nor the block is this process's own time, for as long as others would wait.

    Args:
        path: the lock file; it stays behind and is empty of meaning when nobody holds it.
        wait_s: how long to wait for another process that holds it.

    Raises:
        DataError: another process still held the lock after ``wait_s``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    prepares = Aside(what="prepares", limit_s=wait_s)
    try:
        with aside(prepares):
            _acquire(descriptor, path, wait_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        with aside(prepares):  # anew: its time is no part of the wait's
            yield
    finally:
        os.close(descriptor)  # releases the lock


def _acquire(descriptor: int, path: Path, wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    tell_s = time.monotonic() + _TELL_AFTER_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
        else:
            return
        if time.monotonic() >= tell_s:
            _LOG.info("waiting for process %s, which builds %s", holder, path.parent)
            tell_s = math.inf
        if time.monotonic() >= deadline_s:
            raise DataError(
                f"process {holder} has been building the cache {path.parent} for longer than "
                f"{wait_s:g} s",
                remedy="wait for it and run the same command again, raise data.lock_wait_s, "
                "or end that process; what it has built is kept",
            )
        time.sleep(_POLL_S)
