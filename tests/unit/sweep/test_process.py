"""All processes of a job end with it, whatever sessions and parents they have by then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from sparsepipe.sweep import process
from sparsepipe.sweep.process import JobProcess

# A child in a session of its own, and one whose parent is gone.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(100)"]
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    subprocess.Popen(sleep, start_new_session=True)
    os._exit(0)
time.sleep(100)
"""


def started(mark: str, path: Path) -> JobProcess:
    first = subprocess.Popen(
        [sys.executable, "-S", "-c", FAMILY],
        env={**os.environ, process.MARK_VARIABLE: mark},
        cwd=path,
        start_new_session=True,
    )
    return JobProcess(first, mark)


def wait_for(condition, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def test_a_whole_family_is_found_and_killed(tmp_path: Path) -> None:
    job, other = started("one", tmp_path), started("other", tmp_path)
    try:
        # The first process, two sleepers, and for a moment the parent of one of them.
        wait_for(lambda: len(process.marked("one")) == 3 and len(process.marked("other")) == 3)
        assert job.alive()
        job.kill()
        wait_for(lambda: not job.alive())
        assert process.marked("one") == []
        # Somebody else's; three may have been there before the parent of a sleeper had ended.
        wait_for(lambda: len(process.marked("other")) == 3)
    finally:
        for one in (job, other):
            one.kill()
            wait_for(lambda one=one: not one.alive())


def test_what_is_left_of_a_job_that_has_ended_is_seen(tmp_path: Path) -> None:
    job = started("first", tmp_path)
    try:
        wait_for(lambda: len(process.marked("first")) == 3)
        job.first.kill()
        job.first.wait()
        assert job.exit_code() == -9
        assert job.alive(), "two are left"
    finally:
        job.kill()
        wait_for(lambda: not job.alive())
