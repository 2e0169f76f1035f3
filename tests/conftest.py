"""Fixtures shared by every room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CHECK_DATA = "SPARSEPIPE_TEST_DATA"


@pytest.fixture(scope="session")
def check_data() -> Path:
    """Root of the real data some tests read; they are skipped where it is absent."""
    root = os.environ.get(CHECK_DATA)
    if not root or not Path(root).is_dir():
        pytest.skip(
            f"no real data: set {CHECK_DATA} to a directory with ModelNet meshes and points"
        )
    return Path(root)
