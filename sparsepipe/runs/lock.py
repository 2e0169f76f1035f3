"""One process at a time works on a run's directory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Iterator
from typing import IO

from sparsepipe.aside import Aside, aside
from sparsepipe.config.outputs import writing
from sparsepipe.errors import ConfigError
from sparsepipe.runs.rundir import RunDir

log = logging.getLogger(__name__)
_POLL_S = 0.1


@contextlib.contextmanager
def locked(directory: RunDir, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keeps two processes from working on one run.

    The file stays: who waits for it may have it open already.

    Args:
        directory: of the run.
        wait_s: how long to wait for another process that works on it; not this one's own time.

    Raises:
        ConfigError: another one does, and still did after that time.
        SparsePipeError: the directory cannot be made.
    """
    path = directory.path.parent / f".{directory.run_id}.lock"
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    with stream:
        if not _take(stream):
            _wait(stream, directory, wait_s)
        yield


def _wait(stream: IO[str], directory: RunDir, wait_s: float) -> None:
    if wait_s:
        log.info("another process is working on %s: waiting for it", directory.path)
    deadline_s = time.monotonic() + wait_s
    with aside(Aside(what="waits")):
        while not _take(stream):
            if time.monotonic() >= deadline_s:
                so_long = f", for longer than {wait_s:g} s" if wait_s else ""
                raise ConfigError(
                    f"another process is working on {directory.path}{so_long}",
                    remedy="wait for it or end it, then run the command again",
                )
            time.sleep(_POLL_S)


def _take(stream: IO[str]) -> bool:
    """Takes the lock where nobody has it; whether this process has it now."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
