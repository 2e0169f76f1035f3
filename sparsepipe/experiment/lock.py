"""One process at a time works on a run's directory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from typing import IO

from sparsepipe.errors import ConfigError
from sparsepipe.experiment.outputs import writing
from sparsepipe.experiment.rundir import RunDir

log = logging.getLogger(__name__)
_POLL_S = 0.1


@contextlib.contextmanager
def locked(
    directory: RunDir, *, wait_s: float = 0.0, waits: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Keeps two processes from working on one run.

    The file stays: who waits for it may have it open already.

    Args:
        directory: of the run.
        wait_s: how long to wait for another process that works on it.
        waits: is called where that has to be waited for.

    Raises:
        ConfigError: another one does, and still did after that time.
        SparsePipeError: the directory cannot be made.
    """
    path = directory.path.parent / f".{directory.run_id}.lock"
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    with stream:
        _acquire(stream, directory, wait_s, waits)
        yield


def _acquire(
    stream: IO[str], directory: RunDir, wait_s: float, waits: Callable[[], object]
) -> None:
    deadline_s = time.monotonic() + wait_s
    told = False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() >= deadline_s:
                so_long = f", for longer than {wait_s:g} s" if wait_s else ""
                raise ConfigError(
                    f"another process is working on {directory.path}{so_long}",
                    remedy="wait for it or end it, then run the command again",
                ) from error
        else:
            return
        if not told:
            log.info("another process is working on %s: waiting for it", directory.path)
            waits()
            told = True
        time.sleep(_POLL_S)
