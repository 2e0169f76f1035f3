"""GPUs that other sweeps of this machine use: a lock for each, held as long as a job has it."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from sparsepipe.sweep import tree
from sparsepipe.sweep.slots import Demand, Grant, Slots

log = logging.getLogger(__name__)


class GpuLocks:
    """Locks of GPUs, by which sweeps that share a directory share no GPU.

    A lock dies with the process that holds it; its file stays, and means nothing by itself. Where
    files cannot be locked there are no locks, which is told.

    Args:
        directory: of the lock files; None: nothing is locked.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._held: dict[str, IO[str]] = {}
        self._told: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._give_back(set(self._held))

    def grant(self, slots: Slots, wanted: Demand, *, number: int) -> Grant | None:
        """What a job gets now, with its GPUs locked; None where it has to wait, with none locked.

        GPUs that another sweep has are passed over where others do as well. Nothing is waited for
        here, so that no two sweeps wait for each other.

        Args:
            slots: what of the machine is taken by this sweep.
            wanted: what the job takes.
            number: of the job, to tell of it once where it waits for another sweep.
        """
        elsewhere: tuple[str, ...] = ()
        while (grant := slots.grant(wanted, elsewhere=elsewhere)) is not None:
            refused = self._lock(slots, grant)
            if refused is None:
                return grant
            elsewhere = (*elsewhere, refused)
        if elsewhere and self._told != number:
            self._told = number
            log.info(
                "job %d waits for a GPU that another sweep holds (%s)",
                number + 1,
                ", ".join(f"{each}: process {self._holder(slots, each)}" for each in elsewhere),
            )
        return None

    def keep(self, slots: Slots) -> None:
        """Gives back what no job of this sweep has any more."""
        names = _names(slots)
        self._give_back(set(self._held) - {names[token] for token in slots.gpus_used})

    def _lock(self, slots: Slots, grant: Grant) -> str | None:
        """All of a job's GPUs, or none; which one another sweep has."""
        names = _names(slots)
        taken: set[str] = set()
        # All sweeps in one order: of two that want the same ones, one gets them.
        for token in sorted(grant.gpus, key=names.__getitem__):
            name = names[token]
            if name in self._held or self._directory is None:
                continue
            try:
                self._held[name] = _locked(self._directory, name)
            except BlockingIOError:
                self._give_back(taken)
                return token
            except OSError as error:
                log.warning("GPUs are not locked, so that other sweeps may use them: %s", error)
                self._directory = None
            else:
                taken.add(name)
        return None

    def _give_back(self, names: set[str]) -> None:
        for name in names:
            self._held.pop(name).close()

    def _holder(self, slots: Slots, token: str) -> str:
        assert self._directory is not None
        said = ""
        with suppress(OSError, UnicodeDecodeError):
            said = _file(self._directory, _names(slots)[token]).read_text().strip()
        return said or "unknown"


def machine_wide() -> GpuLocks:
    """Those that all sweeps of this user share on this machine.

    A sweep within a job of a sweep has none: what it may see, that job has locked.
    """
    if tree.MARK_VARIABLE in os.environ:
        return GpuLocks()
    # Not XDG_RUNTIME_DIR, which is no more once the user has logged out, and not there for cron.
    return GpuLocks(Path(tempfile.gettempdir()) / f"sparsepipe-gpus-{os.getuid()}")


def _names(slots: Slots) -> dict[str, str]:
    """What GPUs are called in all sweeps, whatever each calls them."""
    return {gpu.token: gpu.uuid or gpu.token for gpu in slots.machine.gpus}


def _file(directory: Path, name: str) -> Path:
    return directory / f"{name.replace('/', '-')}.lock"


def _locked(directory: Path, name: str) -> IO[str]:
    """The open file of a lock, with the number of this process in it.

    Raises:
        BlockingIOError: another process has it.
        OSError: nobody can have it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} is another user's")
    stream = _file(directory, name).open("a+", encoding="ascii")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
    except OSError:
        stream.close()
        raise
    return stream
