"""Locks of runs, and temporary directories for processes that work together."""

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
    """Locks a run within the block, so that two processes do not work on it at the same time.

    Waits up to ``wait_s`` seconds for another process; then raises a ConfigError.
    """

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
"""File in a directory, locked by the process that made it. A process id would not do, since several
containers may share the temporary directory."""
_LONGEST_BYTES = 107 - len("/listener-12345678")
"""Longest path of a directory for sockets, whose own paths may have 107 bytes."""
_SHARED_MEMORY = Path("/dev/shm")
_SEMAPHORES = "mp-"
"""Prefix of the names of semaphores of ``multiprocessing``."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Makes an empty directory for messages between processes, for the duration of the block.

    A killed process leaves its directory behind; the next process that makes one removes it.
    """
    place = Path(tempfile.gettempdir())
    for path in place.glob(f"{_PREFIX}*"):
        # An error means that it is another user's, in use, or was just removed by another process.
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
    """Lets :func:`scratch` remove the temporary files of this process and its loader workers, even
    if they are killed.

    The sockets that ``multiprocessing`` makes in ``pymp-*`` go into a directory of :func:`scratch`
    that exists as long as this process, and its semaphores ``sem.mp-*`` get the directory's name.
    Later calls of :func:`scratch` thus know which of them belong to a dead process. If the path of
    the directory is too long for sockets, these stay in ``pymp-*``.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if settings.get("semprefix") != "/mp":  # called before; a worker has its parent's
        return
    with suppress(OSError):  # on a full disk, files stay where they are by default
        directory = _kept.enter_context(scratch())
        settings["semprefix"] = f"/{_SEMAPHORES}{directory.name}"
        if settings.get("tempdir") is None and len(os.fsencode(directory)) <= _LONGEST_BYTES:
            settings["tempdir"] = str(directory)
        # Closed after loader workers have ended, when multiprocessing removes its own files too.
        multiprocessing.util.Finalize(None, _kept.close, exitpriority=-100)
