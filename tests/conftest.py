"""Fixtures shared by every room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def check_data() -> Path:
    """Root of the real data some tests read; they are skipped where it is absent."""
    beside = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    root = Path(os.environ.get("SPARSEPIPE_TEST_DATA", beside))
    if not root.is_dir():
        pytest.skip(f"no check data at {root}: set SPARSEPIPE_TEST_DATA to its root")
    return root
