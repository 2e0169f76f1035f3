"""Access to this machine's kernel: commands ``ip`` and ``tc``, processes, and namespaces."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from sparsepipe.emulate.layout import Command, Owner
from sparsepipe.errors import HardwareError

NAMESPACES = Path("/run/netns")
"""Directory in which ``ip netns`` keeps namespaces."""
_PLACES = ":/usr/sbin:/sbin"
_LIMIT_S = 20.0
_PATIENCE_S = 5.0
_ADMINISTRATION = (12, 21)
"""The kernel's numbers of CAP_NET_ADMIN and CAP_SYS_ADMIN."""
_REFUSALS = ("not permitted", "permission denied", "read-only file system")
_LOOPBACK = "or set hardware.network=loopback, which limits no link"


class NotPermitted(HardwareError):
    """Raised if this process may not make or change network namespaces."""


def may_administer() -> bool:
    """Whether this process has the capabilities to make namespaces and interfaces."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return False  # not Linux
    capabilities = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return all(int(capabilities.split()[1], 16) >> bit & 1 for bit in _ADMINISTRATION)


def do(command: Command) -> None:
    """Runs a command of ``ip`` or ``tc``.

    Raises:
        NotPermitted: this process may not run the command.
        HardwareError: the command is not installed, fails or does not end.
    """
    program = shutil.which(command[0], path=os.environ.get("PATH", "") + _PLACES)
    if program is None:
        raise HardwareError(
            f"emulated hosts need the command {command[0]}, which is not installed",
            remedy=f"install the package iproute2, {_LOOPBACK}",
        )
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise HardwareError(
            f"`{' '.join(command)}` has not ended within {_LIMIT_S:g} s",
            remedy=f"run the command again when the machine is less busy, {_LOOPBACK}",
        ) from error
    if done.returncode:
        raise refusal(command, done.stderr or done.stdout)


def refusal(command: Command, output: str) -> HardwareError:
    """The error for a failed command with this output."""
    text = f"`{' '.join(command)}` failed: {' '.join(output.split()) or 'no message'}"
    low = output.lower()
    if any(words in low for words in _REFUSALS):
        return NotPermitted(
            text, remedy=f"run as root, or with CAP_NET_ADMIN and CAP_SYS_ADMIN, {_LOOPBACK}"
        )
    return HardwareError(
        text,
        remedy="check that the kernel has the modules veth, bridge and sch_tbf, and see the state "
        f"of this machine (`ip netns`, `ip link`), {_LOOPBACK}",
    )


def namespaces() -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(path.name for path in NAMESPACES.iterdir())
    return []


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def owner_of(pid: int) -> Owner | None:
    """The process with this id and its start time; None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # a process's name may contain anything
    return None if fields[0] in "ZX" else Owner(pid=pid, started=int(fields[19]))


def living_in(namespace: str) -> list[int]:
    """Ids of the processes in a network namespace."""
    found = []
    with suppress(FileNotFoundError):
        place = (NAMESPACES / namespace).stat()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended while we looked, or is another user's
                theirs = (process / "ns" / "net").stat()
                if (theirs.st_dev, theirs.st_ino) == (place.st_dev, place.st_ino):
                    found.append(int(process.name))
    return found


def end_processes(of: Collection[str]) -> list[int]:
    """Kills all processes in namespaces ``of`` but this one; returns ids of those still alive."""
    handles: dict[int, int] = {}
    try:
        for namespace in of:
            for pid in living_in(namespace):
                if pid != os.getpid() and pid not in handles:
                    with suppress(ProcessLookupError):
                        handles[pid] = os.pidfd_open(pid)
        # Looked up again now that handles exist: an id may have been reused before.
        there = {pid for namespace in of for pid in living_in(namespace)}
        for pid in handles.keys() & there:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handles[pid], signal.SIGKILL)
        left = {pid: handles[pid] for pid in handles.keys() & there}
        deadline_s = time.monotonic() + _PATIENCE_S
        while left and time.monotonic() < deadline_s:
            ready, _, _ = select.select(list(left.values()), [], [], 0.1)
            left = {pid: handle for pid, handle in left.items() if handle not in ready}
        return sorted(left)
    finally:
        for handle in handles.values():
            os.close(handle)
