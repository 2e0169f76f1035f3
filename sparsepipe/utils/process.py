"""This process: memory that it frees, garbage that Python looks for, and its end with its parent.

By default glibc returns large blocks, which the kernel must clear page by page when the next
minibatch allocates them again. Without glibc, the functions on memory have no effect.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import connection

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_MANY = 65536
"""glibc's default for the number of blocks that it maps one by one."""
_LARGE_BYTES = 128 * 1024
"""glibc's initial size from which it maps a block by itself."""
_VARIABLES = ("mmap_max", "mmap_threshold", "trim_threshold", "top_pad")
"""Settings of glibc's malloc that concern freed memory."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.5
_outlives = threading.Event()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses Python's collector of cyclic garbage, for imports of large libraries.

    They make objects that stay, among which the collector would search in vain: a sixth of the
    time that it takes to import PyTorch and Lightning.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def has_glibc() -> bool:
    """Whether this interpreter's C library is glibc."""
    return platform.libc_ver()[0] == "glibc"


def user_decides(environment: Mapping[str, str]) -> bool:
    """Whether variables such as ``MALLOC_TRIM_THRESHOLD_``, with which the process was started,
    configure glibc's malloc.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in _VARIABLES
    )


def keep_freed_memory() -> None:
    """Lets the process keep freed memory for later allocations, unless the user decides.

    Its memory then stays at its peak, which may be higher than otherwise, since kept blocks leave
    holes between them.
    """
    if has_glibc() and not user_decides(os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_freed_memory_back() -> None:
    """Returns free memory to the system, and large blocks whenever they are freed from now on.

    Blocks that fit into holes between others, as where memory was kept before, are not returned.
    """
    if has_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, _MANY)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # which also stops it from growing
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)


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
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):

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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


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
