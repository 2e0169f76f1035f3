"""One process at a time works on a run's directory."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator

from sparsepipe.errors import ConfigError
from sparsepipe.experiment.outputs import writing
from sparsepipe.experiment.rundir import RunDir


@contextlib.contextmanager
def locked(directory: RunDir) -> Iterator[None]:
    """Keeps two processes from working on one run.

    The file stays: who waits for it may have it open already.

    Raises:
        ConfigError: another one does.
        SparsePipeError: the directory cannot be made.
    """
    path = directory.path.parent / f".{directory.run_id}.lock"
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another process is working on {directory.path}",
                remedy="wait for it or end it, then run the command again",
            ) from error
        yield
