"""Fixtures shared by every room."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

CHECK_DATA = "SPARSEPIPE_TEST_DATA"

# Without this, MKL may round the same product in another way where its operands lie elsewhere in
# memory (seen on an AMD EPYC), and bits that tests compare differ between processes. It is read
# at the first product, and inherited by the processes that tests start.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def pytest_configure() -> None:
    """Lets tests interrupt their processes, also under nohup or in a script's background.

    Whoever starts the suite there has it ignore signals, and children inherit that.
    """
    for signum in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_IGN:
            python = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if python else signal.SIG_DFL)


@pytest.fixture(scope="session")
def check_data() -> Path:
    """Root of the real data some tests read; they are skipped where it is absent."""
    root = os.environ.get(CHECK_DATA)
    if not root or not Path(root).is_dir():
        pytest.skip(
            f"no real data: set {CHECK_DATA} to a directory with ModelNet meshes and points"
        )
    return Path(root)
