"""Where the checkout is, and how processes that tests start import it and these helpers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONF = Path(__file__).parent / "conf"


def python_path() -> str:
    """``PYTHONPATH`` for processes that import the package and ``tests.support``."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def environment(**variables: str) -> dict[str, str]:
    """This process's variables, for another one that computes with one thread."""
    return {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **variables}


def run_python(
    cwd: Path, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = 280
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a directory to its end."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
