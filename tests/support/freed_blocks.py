"""How much of what a process frees stays resident, by the kernel's own count."""

from __future__ import annotations

import os

import pytest
import torch

from sparsepipe.tasks.fitting.memory import status_bytes
from sparsepipe.utils.process import has_glibc, user_decides

BLOCKS, BLOCK_MIB = 4, 50
"""What is freed. Blocks of more than 32 MiB glibc never keeps by itself."""

needs_glibc = pytest.mark.skipif(not has_glibc(), reason="glibc's malloc alone is told what to do")
needs_glibcs_own = pytest.mark.skipif(
    not has_glibc() or user_decides(os.environ), reason="glibc's variables are set, or it is none"
)


def kept_mib() -> int:
    """Allocates blocks, writes to them and frees them; how many MiB of them stay resident."""
    blocks = [torch.ones(BLOCK_MIB * 2**20 // 4) for _ in range(BLOCKS)]
    alive = resident_mib()
    del blocks
    return BLOCKS * BLOCK_MIB - (alive - resident_mib())


def resident_mib() -> int:
    """Of this process."""
    return status_bytes("VmRSS") // 2**20
