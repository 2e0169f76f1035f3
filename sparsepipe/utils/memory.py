"""Memory of this process: whether glibc's malloc keeps what is freed, and when Python looks for it.

By default glibc returns large blocks, which the kernel must clear page by page when the next
minibatch allocates them again. Without glibc, nothing here has an effect.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_MANY = 65536
"""glibc's default for the number of blocks that it maps one by one."""
_LARGE_BYTES = 128 * 1024
"""glibc's initial size from which it maps a block by itself."""
_VARIABLES = ("mmap_max", "mmap_threshold", "trim_threshold", "top_pad")
"""Settings of glibc's malloc that concern freed memory."""


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


def keep_freed_memory() -> None:
    """Lets the process keep freed memory for later allocations from now on.

    Its memory then stays at its peak, which may be higher than otherwise, since kept blocks leave
    holes between them. Where the user has set glibc's own variables (see :func:`user_decides`),
    nothing changes.
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


def user_decides(environment: Mapping[str, str]) -> bool:
    """Whether environment variables such as ``MALLOC_TRIM_THRESHOLD_`` configure glibc's malloc.

    Args:
        environment: the variables with which the process was started.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in _VARIABLES
    )


def has_glibc() -> bool:
    """Whether this interpreter's C library is glibc."""
    return platform.libc_ver()[0] == "glibc"
