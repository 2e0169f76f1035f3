"""Settings of this process: how it multiplies, its freed memory, and its end with its parent.

By default glibc returns large blocks to the kernel, which must clear them page by page when the
next minibatch allocates them again. Without glibc, the functions on memory have no effect.
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
from typing import Literal

MatmulPrecision = Literal["highest", "high", "medium"]
"""Torch's names for the precision of products of float32 numbers."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_MANY = 65536
"""glibc's default for the largest number of blocks that it maps one by one."""
_LARGE_BYTES = 128 * 1024
"""glibc's initial threshold: larger blocks are mapped one by one."""
_VARIABLES = ("mmap_max", "mmap_threshold", "trim_threshold", "top_pad")
"""Settings of glibc's malloc that concern freed memory."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOOK_S = 0.5
_outlives = threading.Event()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pauses Python's cyclic garbage collector while the block imports large libraries.

    Objects of libraries live on, so the collector would find nothing, but take a sixth of the time
    of importing PyTorch and Lightning.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def matmul_precision_on(accelerator: str, chosen: MatmulPrecision | None) -> MatmulPrecision:
    """Returns ``chosen``, or if it is None, ``high`` on ``cuda`` and ``highest`` on ``cpu``.

    On CUDA, torch by default uses TF32 in dense convolutions, but not in the matrix products of
    sparse ones; a comparison of the two needs the same precision in both.
    """
    return chosen or ("high" if accelerator == "cuda" else "highest")


def set_matmul_precision(precision: MatmulPrecision) -> None:
    """Sets how this process multiplies float32 numbers in matrix products and cuDNN's convolutions.

    On CUDA, both use TF32 with ``high`` and ``medium``, and neither does with ``highest``. On a
    CPU, ``high`` and ``medium`` let oneDNN round to TF32 and bfloat16 where the CPU has them.
    """
    import torch  # takes seconds, which processes that only start others need not wait for

    # These set torch's newer ``fp32_precision`` as well. If only that was set, Lightning's reading
    # of these would be an error.
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"


@contextmanager
def multiplying(precision: MatmulPrecision) -> Iterator[None]:
    """Sets the precision as :func:`set_matmul_precision` does, but only within the block.

    A process that has set torch's newer ``fp32_precision`` itself keeps what it has set.
    """
    import torch

    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch's older settings can no longer be read
        yield
        return
    set_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def has_glibc() -> bool:
    """Whether this interpreter's C library is glibc."""
    return platform.libc_ver()[0] == "glibc"


def user_decides(environment: Mapping[str, str]) -> bool:
    """Whether environment variables such as ``MALLOC_TRIM_THRESHOLD_`` configure what glibc's
    malloc does with freed memory.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in _VARIABLES
    )


def keep_freed_memory() -> None:
    """Lets the process keep freed memory for later allocations, unless the user configured malloc.

    Its memory use then stays at its peak, which may be higher than otherwise, since kept blocks
    leave holes between them.
    """
    if has_glibc() and not user_decides(os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_freed_memory_back() -> None:
    """Returns free memory to the system now, and large blocks from now on when they are freed.

    Blocks in holes between others, left by memory kept earlier, are not returned.
    """
    if has_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, _MANY)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # which also stops it from growing
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process as soon as its parent ends, however that happens.

    This needs no thread, which an import may delay for seconds. To the kernel, the parent is the
    thread that started this process; the kernel forgets the request when the process changes its
    credentials. On systems other than Linux, a thread checks the parent twice a second.

    Args:
        parent: process id of the parent; this process ends at once if that is no longer its parent.
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
    """Undoes :func:`end_with_parent`."""
    _outlives.set()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def exit_with_parent() -> None:
    """Exits this process of ``multiprocessing`` as soon as the process that started it ends.

    To the kernel, the parent may be a fork server, so a thread waits for the right process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="exit-with-parent", daemon=True).start()
