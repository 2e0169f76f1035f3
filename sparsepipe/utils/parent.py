"""Ends a process with the one that has started it, also where that is killed."""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import signal
import sys
import threading
from multiprocessing import connection

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
    by_main_thread = True
    """Whether the fork that goes on was made by the main thread."""


_registered = _Registered()


def end_workers_with_this() -> None:
    """Lets processes that ``multiprocessing`` forks from this one end with it.

    Loaders of anybody's fork their workers, which look for their parent every five seconds only.
    """
    if not _registered.done:
        _registered.done = True
        os.register_at_fork(before=_note_thread)
        multiprocessing.util.register_after_fork(_registered, _follow)


def exit_with_parent() -> None:
    """Exits this process, which ``multiprocessing`` has started, as soon as its parent has ended.

    A thread waits for that, so that a process that is stopped ends when it goes on.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()


def _note_thread() -> None:
    _registered.by_main_thread = threading.current_thread() is threading.main_thread()


def _follow(_: object) -> None:
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    if _registered.by_main_thread:
        end_with_parent(parent.pid)
    else:  # the kernel would kill this process when that thread ends
        exit_with_parent()
