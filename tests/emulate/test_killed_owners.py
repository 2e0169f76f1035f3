"""Clusters whose process is killed while it makes or has them: the next start removes the rest."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespace_cases import left, needs_namespaces

PROGRAM = Path(__file__).parent / "programs" / "own_a_cluster.py"
PATHS = (Path(__file__).parents[2], Path(__file__).parent)


def start() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    return subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True, env=environment
    )


def end_well(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert int(process.stdout.readline()) > 0, "a process on the first host"
    process.terminate()
    process.wait(60)


@needs_namespaces
@pytest.mark.full
def test_of_twenty_owners_five_are_killed_and_nothing_stays() -> None:
    draw = random.Random(3)
    killed_ones = set(draw.sample(range(19), 5))  # the last start removes what others left
    killed = []
    for number in range(20):
        with start() as process:
            if number not in killed_ones:
                end_well(process)
                assert [name for pid in (*killed, process.pid) for name in left(pid)] == []
                continue
            while not left(process.pid):
                time.sleep(0.001)
            time.sleep(0.3 * draw.random() ** 2)  # making takes some tenths of one
            process.kill()
            process.wait(60)
            killed.append(process.pid)
    assert len(killed) == 5
