"""GPUs that other sweeps of this machine use: a lock file for each, held while a job has it."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from sparsepipe.sweep.process import MARK_VARIABLE
from sparsepipe.sweep.slots import Demand, Grant, Slots

log = logging.getLogger(__name__)


class GpuLocks:
    """Locks of GPUs, by which sweeps that share a directory share no GPU.

    A lock ends with the process that holds it. Where files cannot be locked there are no locks, and
    a warning.

    Args:
        directory: of the lock files; None: nothing is locked.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._held: dict[str, FileLock] = {}
        self._waiting: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._release(set(self._held))

    def grant(self, slots: Slots, needed: Demand, *, number: int) -> Grant | None:
        """The grant that a job gets now, with its GPUs locked; None if it has to wait.

        GPUs that another sweep has are passed over where others do as well. This never waits, so
        that no two sweeps wait for each other.
        """
        elsewhere: tuple[str, ...] = ()
        while (grant := slots.grant(needed, elsewhere=elsewhere)) is not None:
            refused = self._lock(slots, grant)
            if refused is None:
                return grant
            elsewhere = (*elsewhere, refused)
        if elsewhere and self._waiting != number:
            self._waiting = number
            gpus = ", ".join(elsewhere)
            log.info("job %d waits for a GPU that another sweep holds (%s)", number + 1, gpus)
        return None

    def keep(self, slots: Slots) -> None:
        """Releases GPUs that no job of this sweep has any more."""
        names = _names(slots)
        self._release(set(self._held) - {names[token] for token in slots.gpus_used})

    def _lock(self, slots: Slots, grant: Grant) -> str | None:
        """Locks all of a job's GPUs or none; returns the token of one that another sweep has."""
        names = _names(slots)
        locked: set[str] = set()
        # All sweeps in one order: of two that want the same ones, one gets them.
        for token in sorted(grant.gpus, key=names.__getitem__):
            name = names[token]
            if name in self._held or self._directory is None:
                continue
            try:
                self._held[name] = _locked(self._directory, name)
            except Timeout:
                self._release(locked)
                return token
            except OSError as error:
                log.warning("GPUs are not locked, so that other sweeps may use them: %s", error)
                self._directory = None
            else:
                locked.add(name)
        return None

    def _release(self, names: set[str]) -> None:
        for name in names:
            self._held.pop(name).release()


def machine_wide() -> GpuLocks:
    """The locks that all sweeps of this user share on this machine.

    A sweep within a job of a sweep has none: that job has locked the GPUs that it may see.
    """
    if MARK_VARIABLE in os.environ:
        return GpuLocks()
    # Not XDG_RUNTIME_DIR, which is no more once the user has logged out, and not there for cron.
    return GpuLocks(Path(tempfile.gettempdir()) / f"sparsepipe-gpus-{os.getuid()}")


def _names(slots: Slots) -> dict[str, str]:
    """Names of GPUs that all sweeps share, by this sweep's tokens."""
    return {gpu.token: gpu.uuid or gpu.token for gpu in slots.machine.gpus}


def _locked(directory: Path, name: str) -> FileLock:
    """The lock of a GPU, acquired."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} is another user's")
    lock = FileLock(directory / f"{name.replace('/', '-')}.lock", thread_local=False)
    lock.acquire(blocking=False)
    return lock
