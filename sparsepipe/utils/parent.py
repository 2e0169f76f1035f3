"""Processes that end with the one that has started them, also where that is killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import connection

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.5
_outlives = threading.Event()


def end_with_parent(parent: int) -> None:
    """Lets the kernel kill this process as soon as its parent has ended, however that happens.

    This needs no thread of this process, which may be stopped or import something for seconds. The
    kernel takes the thread that has started this process for the parent, and forgets the request
    when the process changes its rights. On systems other than Linux a thread looks for the parent
    twice a second.

    Args:
        parent: number of the parent; this process ends at once if it has another one already.
    """
    _outlives.clear()
    if not _signal_at_end_of_parent(signal.SIGKILL):

        def watch() -> None:
            while not _outlives.wait(_LOOK_S):
                if os.getppid() != parent:
                    os._exit(1)

        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Takes :func:`end_with_parent` back."""
    _outlives.set()
    _signal_at_end_of_parent(0)


def _signal_at_end_of_parent(signum: int) -> bool:
    return sys.platform == "linux" and not ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def exit_with_parent() -> None:
    """Exits this process, which ``multiprocessing`` has started, as soon as its parent has ended.

    The kernel's parent of such a process may be a fork server, so a thread waits for the end.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="exit-with-parent", daemon=True).start()
