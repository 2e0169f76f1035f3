"""Directories for what processes tell each other while a job runs, beside its results.

A process that is killed leaves its own behind: the next one that needs such a directory removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "sparsepipe-"
_LOCK = ".in-use"
"""Held by who has made the directory: the kernel lets go of it, however that process ends. Numbers
of processes would not tell, where containers share the place."""


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty directory for the time of the block."""
    place = Path(tempfile.gettempdir())
    _remove_left(place)
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    with (made / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Under its name only now, so that nobody takes it for one that was left.
        found = made.rename(place / f"{_PREFIX}{os.getpid()}-{made.name.rpartition('-')[2]}")
        try:
            yield found
        finally:
            shutil.rmtree(found, ignore_errors=True)


def _remove_left(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        # Somebody else's, one in use, or one that another process has just removed.
        with suppress(OSError), (path / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
