"""What becomes of memory that this process has freed: glibc keeps it, or gives it back.

Left alone it gives back what is large, which the kernel must clear page by page when the next
minibatch asks for it. Open to every room; other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_NEVER = -1
_LARGE_BYTES = 128 * 1024
"""From where on glibc maps a block by itself, until it has learnt larger ones."""


def keep_freed_memory() -> None:
    """From now on freed memory stays for the next that is asked for, whatever its size.

    The process then has the most that it ever had. Where somebody has said by glibc's own
    variables what it is to do (see :func:`user_decides`), nothing changes.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and not user_decides(os.environ):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_freed_memory_back() -> None:
    """What is free by now goes back to the system, and from now on large blocks do at once."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(_M_MMAP_MAX, 65536)  # as it was at first
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # which also stops it from growing
        libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES)
        libc.malloc_trim(0)


def user_decides(environment: Mapping[str, str]) -> bool:
    """Whether an environment tells glibc's malloc what to do: ``MALLOC_*_`` or its tunables."""
    named = any(name.startswith("MALLOC_") and name.endswith("_") for name in environment)
    return named or "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
