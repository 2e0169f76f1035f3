"""What a process takes of memory by its own measurement, and the limits around it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.tasks.fitting.memory import ResidentPeak, status_bytes

MB = 10**6


def test_the_peak_counts_what_is_gone_again() -> None:
    room = np.ones(100 * MB // 8)  # resident before
    peak = ResidentPeak()
    assert peak.bytes() < 5 * MB, "what was there before does not count"
    first = np.ones(64 * MB // 8)
    del first
    second = np.ones(32 * MB // 8)
    assert 60 * MB < peak.bytes() < 75 * MB
    del second, room


def test_an_earlier_peak_does_not_count() -> None:
    large = np.ones(200 * MB // 8)
    del large
    peak = ResidentPeak()
    small = np.ones(16 * MB // 8)
    assert 14 * MB < peak.bytes() < 25 * MB
    del small


def test_an_unknown_size_is_an_error() -> None:
    assert status_bytes("VmRSS") > MB
    with pytest.raises(OSError, match="no VmNothing"):
        status_bytes("VmNothing")


PREAMBLE = """
import os, time
from sparsepipe.tasks.fitting.memory import *
"""
WATCHED = """
end_beyond(status_bytes("VmRSS") + 100_000_000)
held = []
for _ in range(40):
    held.append(bytearray(b"x") * 20_000_000)  # 800 MB in the end
    time.sleep(0.05)
"""
LIMITED = """
limit_allocations(100_000_000)
bytearray(50_000_000)
try:
    bytearray(10**12)  # at once, before any watch could see it
except MemoryError:
    os._exit(92)
"""
VICTIM = """
prefer_as_victim()
os._exit(0 if open("/proc/self/oom_score_adj").read().strip() == "1000" else 1)
"""
FREED = """
peak = ResidentPeak()
bytearray(b"x") * 24_000_000  # glibc learns that such blocks come and go
first, second = (bytearray(b"x") * 20_000_000 for _ in range(2))
above = bytearray(b"x") * 1_000_000  # what is below it in the heap cannot shrink
del first, second
other = bytearray(b"x") * 45_000_000
os._exit(0 if peak.bytes() < 55_000_000 else 1)
"""


@pytest.mark.parametrize(
    ("program", "code"), [(WATCHED, 91), (LIMITED, 92), (VICTIM, 0), (FREED, 0)]
)
def test_limits_end_a_process_that_passes_them(program: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PREAMBLE + program], check=False, timeout=120)
    assert done.returncode == code


def test_a_probe_that_nobody_waits_for_ends_though_torch_is_still_to_come(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(300)\n")
    (tmp_path / "parent").write_bytes(pickle.dumps(-1))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "sparsepipe.tasks.fitting.probe", tmp_path],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert not (tmp_path / "answer").exists()
