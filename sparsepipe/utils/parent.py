"""Ends a process with the one that has started it, also where that is killed."""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> bool:
    """Lets the kernel kill this process as soon as its parent has ended, however that happens.

    It needs no thread of this process, which may be stopped or import something for seconds. The
    kernel counts the thread of the parent that has started this process as the parent. A change of
    the process's rights takes the effect back.

    Args:
        parent: the parent's number; this process ends at once where another one is its parent.

    Returns:
        Whether the system can do that: Linux does.
    """
    able = sys.platform == "linux" and not ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )
    if os.getppid() != parent:  # it had ended before
        os._exit(1)
    return able


class _Registered:
    """What multiprocessing knows this file by, and keeps a weak reference to."""

    done = False


_registered = _Registered()


def end_workers_with_this() -> None:
    """Lets processes that ``multiprocessing`` forks from this one end with it.

    Loaders of anybody's fork their workers, which look for their parent every five seconds only.
    """
    if not _registered.done:
        _registered.done = True
        multiprocessing.util.register_after_fork(_registered, _follow)


def _follow(_: object) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with_parent(parent.pid)
