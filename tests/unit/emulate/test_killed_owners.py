"""Clusters whose process is killed while it makes or has them: the next start removes the rest."""

from __future__ import annotations

import random
import signal
import subprocess
import time

import pytest

from tests.support.namespace_cases import left, needs_namespaces, start


def end_well(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert int(process.stdout.readline()) > 0, "a process on the first host"
    process.terminate()
    process.wait(60)


def kill_while_it_makes(process: subprocess.Popen[str], *, after_s: float) -> None:
    """Kills a process some time after its first namespace is there; making takes tenths of one."""
    deadline_s = time.monotonic() + 60
    while not left(process.pid):
        assert process.poll() is None, "it has ended before it made anything"
        assert time.monotonic() < deadline_s, "it has made nothing"
        time.sleep(0.001)
    time.sleep(after_s)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL


@needs_namespaces
@pytest.mark.full
def test_of_twenty_owners_five_are_killed_and_nothing_stays() -> None:
    draw = random.Random(3)
    killed_ones = set(draw.sample(range(19), 5))  # the last start removes what others left
    killed = []
    for number in range(20):
        with start("own_a_cluster.py") as process:
            if number not in killed_ones:
                end_well(process)
                assert [name for pid in (*killed, process.pid) for name in left(pid)] == []
                continue
            kill_while_it_makes(process, after_s=0.3 * draw.random() ** 2)
            killed.append(process.pid)
    assert len(killed) == 5
