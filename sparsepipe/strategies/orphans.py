"""Ranks that outlive the first one, which Lightning's launcher runs in the script's own process.

Its observer ends all ranks when one has died. One that is stopped or stuck has not, and the
observer ends with the first rank. A small process of its own sees to those: it holds none of the
first rank's connections, whose breaking tells the others at once that it is gone.
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

_PATIENCE_S = 5.0
"""How long ranks may take to notice the first one's end and to tell what they know of it."""

_children: dict[int, subprocess.Popen[bytes]] = {}


def remember(launcher: Any) -> None:
    """Notes what ranks a launcher has started; those of a script's first Trainer serve all."""
    for child in getattr(launcher, "procs", ()):
        if isinstance(child, subprocess.Popen):
            _children.setdefault(child.pid, child)


def end_orphans() -> None:
    """Sees to it that the remembered ranks end some seconds after this process, however it ends.

    Does nothing where the system has no handles for processes: a number may be another's soon.
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
        command = [sys.executable, "-I", "-S", __file__, str(_PATIENCE_S), *map(str, handles)]
        with open(os.devnull, "r+b") as nothing:
            subprocess.Popen(
                command,
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                pass_fds=handles,
                start_new_session=True,  # what ends the script's group is not for it
            )
    except OSError:  # no such handles here, or no room for a process: the error to tell is another
        return
    finally:
        for handle in handles:
            os.close(handle)


def _watch(first: int, others: Sequence[int], patience_s: float) -> None:
    """Waits for the end of a process, and kills those that have not ended some seconds later."""
    _still_running([first], None)
    deadline_s = time.monotonic() + patience_s
    left: Collection[int] = others
    while left and (rest_s := deadline_s - time.monotonic()) > 0:
        left = _still_running(left, rest_s)
    for handle in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _still_running(handles: Collection[int], limit_s: float | None) -> set[int]:
    """Those that have not ended when one has, or when the time is over."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)  # a process's handle can be read when it has ended
    ended = poll.poll(None if limit_s is None else 1000 * limit_s)
    return set(handles) - {handle for handle, _ in ended}


if __name__ == "__main__":
    _, _patience, _first, *_others = sys.argv
    _watch(int(_first), [*map(int, _others)], float(_patience))
