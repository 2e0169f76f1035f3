"""Locks of runs, and directories for processes that work together."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sparsepipe.errors import ConfigError
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import LockHeldError, file_lock, writing

log = logging.getLogger(__name__)


@contextmanager
def locked(directory: RunDir, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keeps two processes from working on one run."""

    def on_wait() -> None:
        if wait_s:
            log.info("another process is working on %s: waiting for it", directory.path)

    path = directory.path.parent / f".{directory.run_id}.lock"
    with ExitStack() as held:
        try:
            with writing(path.parent):
                held.enter_context(file_lock(path, wait_s=wait_s, on_wait=on_wait))
        except LockHeldError:
            limit = f", for longer than {wait_s:g} s" if wait_s else ""
            raise ConfigError(
                f"another process is working on {directory.path}{limit}",
                remedy="wait for it or end it, then run the command again",
            ) from None
        yield


_PREFIX = "sparsepipe-"
_IN_USE = ".in-use"
"""Lock of the process that has made a directory. Numbers of processes would not do, where
containers share the place."""
_LONGEST_BYTES = 107 - len("/listener-12345678")
"""Of a directory in which sockets can have a name; that of a socket has 107 bytes at most."""
_SHARED_MEMORY = Path("/dev/shm")
_SEMAPHORES = "mp-"
"""What names of semaphores of ``multiprocessing`` begin with."""


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty directory for messages between processes while the block runs.

    A process that is killed leaves its own behind; the next one that needs such a directory removes
    it.
    """
    place = Path(tempfile.gettempdir())
    for path in place.glob(f"{_PREFIX}*"):
        # Somebody else's, one in use, or one that another process has just removed.
        with suppress(OSError, LockHeldError):
            if (path / _IN_USE).exists():
                with file_lock(path / _IN_USE):
                    for left in _SHARED_MEMORY.glob(f"sem.{_SEMAPHORES}{path.name}-*"):
                        left.unlink(missing_ok=True)
                    shutil.rmtree(path, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    with file_lock(made / _IN_USE):
        # Renamed only now, so that no process removes it as a leftover.
        found = made.rename(place / f"{_PREFIX}{os.getpid()}-{made.name.rpartition('-')[2]}")
        try:
            yield found
        finally:
            shutil.rmtree(found, ignore_errors=True)


_kept = ExitStack()


def keep_temporary_files_apart() -> None:
    """Lets this process and those of its loaders leave nothing behind, however they end.

    What ``multiprocessing`` makes for them, sockets in ``pymp-*`` and semaphores ``sem.mp-*``, goes
    into a directory of :func:`scratch` that is kept as long as this process lives, and under its
    name. So the next start knows what is of a dead process of ours, and removes nothing else. Where
    the path of that directory is too long for sockets, they stay in ``pymp-*``.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if settings.get("semprefix") != "/mp":  # it has been called; a worker has its parent's
        return
    with suppress(OSError):  # no room: then they go where they always do
        directory = _kept.enter_context(scratch())
        settings["semprefix"] = f"/{_SEMAPHORES}{directory.name}"
        if settings.get("tempdir") is None and len(os.fsencode(directory)) <= _LONGEST_BYTES:
            settings["tempdir"] = str(directory)
        # As multiprocessing removes its own: when loaders have ended.
        multiprocessing.util.Finalize(None, _kept.close, exitpriority=-100)
