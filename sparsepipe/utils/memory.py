"""What becomes of memory that this process has freed: glibc keeps it, or gives it back.

Left alone it gives back what is large, which the kernel must clear page by page when the next
minibatch asks for it. Open to every room; where there is no glibc, nothing changes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_MANY = 65536
"""Blocks that glibc maps by themselves, unless it is told otherwise."""
_LARGE_BYTES = 128 * 1024
"""From where on glibc maps a block by itself, until it has learnt larger ones."""
_SAYS = ("mmap_max", "mmap_threshold", "trim_threshold", "top_pad")
"""Settings of glibc's malloc that say what becomes of freed memory."""


def keep_freed_memory() -> None:
    """From now on freed memory stays for the next that is asked for.

    The process then has the most that it ever had, which may be more than it would have had:
    between blocks that stay there are holes. Where somebody has said by glibc's own variables what
    it is to do (see :func:`user_decides`), nothing changes.
    """
    if has_glibc() and not user_decides(os.environ):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_freed_memory_back() -> None:
    """What is free by now goes back to the system, and large blocks do from now on.

    Not those for which there is room between others, as where memory was kept before.
    """
    if has_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, _MANY)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # which also stops it from growing
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)


def user_decides(environment: Mapping[str, str]) -> bool:
    """Whether an environment tells glibc what to do: by ``MALLOC_TRIM_THRESHOLD_``, say.

    Args:
        environment: as the process began with it.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}=" in tunables
        for name in _SAYS
    )


def has_glibc() -> bool:
    """Whether this interpreter's C library is glibc."""
    return platform.libc_ver()[0] == "glibc"
