"""How much of what a process frees stays resident, by the kernel's own count."""

from __future__ import annotations

import re
from pathlib import Path

import torch

BLOCKS, BLOCK_MIB = 4, 50
"""What is freed. Blocks of more than 32 MiB glibc never keeps by itself."""


def kept_mib() -> int:
    """Allocates blocks, writes to them and frees them; MiB that are resident more than before."""
    _take_and_free(2)
    before = resident_mib()
    _take_and_free(BLOCK_MIB)
    return resident_mib() - before


def resident_mib() -> int:
    """Of this process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) // 1024


def _take_and_free(mib: int) -> None:
    blocks = [torch.ones(mib * 2**20 // 4) for _ in range(BLOCKS)]
    del blocks
