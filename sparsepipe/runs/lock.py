"""One process at a time works on a run's directory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from sparsepipe.config.outputs import writing
from sparsepipe.errors import ConfigError
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import LockHeldError, file_lock

log = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(directory: RunDir, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keeps two processes from working on one run.

    Args:
        directory: the run's directory.
        wait_s: how long to wait for another process that works on the run.

    Raises:
        ConfigError: another process worked on the run for longer than ``wait_s``.
        SparsePipeError: the directory cannot be made.
    """

    def on_wait() -> None:
        if wait_s:
            log.info("another process is working on %s: waiting for it", directory.path)

    path = directory.path.parent / f".{directory.run_id}.lock"
    with contextlib.ExitStack() as held:
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
