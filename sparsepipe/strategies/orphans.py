"""Ends orphaned ranks: those that outlive the first one, which runs in the script's own process.

The observer of Lightning's launcher ends all ranks when one has died. A rank that is stopped or
stuck has not died, and the observer ends with the first rank. So this file is run as a process of
its own, which kills such ranks. It shares none of the first rank's connections: when these break,
the other ranks notice at once that the first one is gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

_GRACE_S = 5.0
"""Time for ranks to notice the end of the first one and to report their own errors."""

_children: dict[int, subprocess.Popen[bytes]] = {}


def register_ranks(launcher: Any) -> None:
    """Registers the ranks that a launcher has started; all Trainers of a script share them."""
    for child in getattr(launcher, "procs", ()):
        if isinstance(child, subprocess.Popen):
            _children.setdefault(child.pid, child)


def end_orphans() -> None:
    """Ends the registered ranks some seconds after the end of this process.

    Does nothing where the system has no handles for processes (``pidfd_open``): by a bare number a
    later process of the same number could be killed.
    """
    running = [pid for pid, child in _children.items() if child.poll() is None]
    _children.clear()
    if not running or not hasattr(os, "pidfd_open"):
        return
    handles: list[int] = []
    try:
        for pid in (os.getpid(), *running):
            with suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
        command = [sys.executable, "-I", "-S", __file__, str(_GRACE_S), *map(str, handles)]
        with open(os.devnull, "r+b") as nothing:
            subprocess.Popen(
                command,
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                pass_fds=handles,
                start_new_session=True,  # what ends the script's group is not for it
            )
    except OSError:  # no handles, or no room for a process: the run's error matters more
        return
    finally:
        for handle in handles:
            os.close(handle)


def _watch(first: int, others: Sequence[int], grace_s: float) -> None:
    """Waits until the first process has ended; kills those that still run some seconds later."""
    _still_running([first], None)
    deadline_s = time.monotonic() + grace_s
    left: Collection[int] = others
    while left and (rest_s := deadline_s - time.monotonic()) > 0:
        left = _still_running(left, rest_s)
    for handle in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _still_running(handles: Collection[int], limit_s: float | None) -> set[int]:
    """Handles of processes that run on when one of them has ended, or at the time limit."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)  # a process's handle can be read when it has ended
    ended = poll.poll(None if limit_s is None else 1000 * limit_s)
    return set(handles) - {handle for handle, _ in ended}


if __name__ == "__main__":
    _, _grace_s, _first, *_others = sys.argv
    _watch(int(_first), [*map(int, _others)], float(_grace_s))
