"""What this process may use of its machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_only_the_cores_of_this_process_count() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not bind processes to cores")
    bound = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    count = "from sparsepipe.machine import usable_cores; print(usable_cores())"
    command = [sys.executable, "-c", f"{bound}; {count}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1\n"
