"""One process at a time makes a ledger: who reads runs first and writes last would lose rows."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from sparsepipe.errors import DataError
from sparsepipe.results.files import explained

log = logging.getLogger(__name__)
LOCK = ".ledger.lock"
_POLL_S = 0.05
_LIMIT_S = 60.0
"""A ledger of thousands of runs takes seconds: who takes longer has been stopped."""


@contextmanager
def ledger_locked(directory: Path) -> Iterator[None]:
    """Keeps other processes from making the ledger in this directory while the block runs.

    The file stays: who waits for it may have it open already. Whose it is does not matter. Where it
    cannot be locked, by its permissions or its file system, the block runs all the same.

    Raises:
        DataError: another process does, for long; or no file can be made there.
    """
    path = directory / LOCK
    with explained(path):
        directory.mkdir(parents=True, exist_ok=True)
        stream = _opened(path)
    with stream or nullcontext():
        if stream and not _taken(stream):
            _wait(stream, directory)
        yield


def _opened(path: Path) -> IO[str] | None:
    """The file, made where there is none; None where another user made it and lets none read it.

    Raises:
        OSError: there is none, and it cannot be made.
    """
    try:
        return path.open("w")
    except PermissionError:
        if not path.exists():
            raise
    try:
        return path.open()  # a lock takes no more where the disk is this machine's
    except PermissionError as error:
        log.info(
            "%s cannot be opened (%s), so that nothing keeps another process from writing the "
            "ledger at the same time. remedy: have its owner remove it, or let others read it",
            path,
            error.strerror,
        )
        return None


def _wait(stream: IO[str], directory: Path) -> None:
    log.info("another process makes the ledger in %s: waiting for it", directory)
    deadline_s = time.monotonic() + _LIMIT_S
    while not _taken(stream):
        if time.monotonic() >= deadline_s:
            raise DataError(
                f"another process has been making the ledger in {directory} for longer than "
                f"{_LIMIT_S:g} s",
                remedy="end it where it hangs, then write the ledger anew "
                "(sparsepipe.results.gather)",
            )
        time.sleep(_POLL_S)


def _taken(stream: IO[str]) -> bool:
    """Takes the lock where nobody has it; whether this process has it now."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # of a file system without locks: as good as it gets
        log.debug("%s cannot be locked: %s", stream.name, error)
    return True
