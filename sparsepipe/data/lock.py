"""One process at a time builds a cache; the lock ends with the process that holds it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sparsepipe.errors import DataError
from sparsepipe.utils.files import LockHeldError, file_lock

_LOG = logging.getLogger(__name__)
_QUIET_S = 3.0
"""Ranks of one run wait for one another for less than this, which is not worth a message."""


@contextmanager
def locked(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs.

    Args:
        path: the lock file, in the folder of the cache. The file stays and means nothing by itself.
        wait_s: how long to wait for another process that holds it.

    Raises:
        DataError: another process still held the lock after ``wait_s``.
    """
    quiet_s = min(_QUIET_S, wait_s)
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(path, wait_s=quiet_s))
        except LockHeldError:
            if wait_s > quiet_s:
                _LOG.info("waiting for another process, which builds %s", path.parent)
            try:
                held.enter_context(file_lock(path, wait_s=wait_s - quiet_s))
            except LockHeldError:
                raise DataError(
                    f"another process has been building the cache {path.parent} for longer than "
                    f"{wait_s:g} s",
                    remedy="wait for it and run the same command again, raise data.lock_wait_s, "
                    "or end that process; what it has built is kept",
                ) from None
        yield
