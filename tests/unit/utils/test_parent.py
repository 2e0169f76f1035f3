"""Processes that end with the one that has started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command_line import wait_for
from tests.support.paths import environment

SCRIPT = """
import os, signal, time, multiprocessing
from pathlib import Path
from sparsepipe.utils.parent import end_workers_with_this

def work():
    Path("worker").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)

end_workers_with_this()
end_workers_with_this()
multiprocessing.get_context("fork").Process(target=work).start()
time.sleep(60)
"""


IN_A_THREAD = """
import multiprocessing, os, threading, time
from pathlib import Path
from sparsepipe.utils.parent import end_workers_with_this

def work():
    Path("worker").write_text(str(os.getpid()))
    time.sleep(60)

end_workers_with_this()
starts = multiprocessing.get_context("fork").Process(target=work).start
helper = threading.Thread(target=starts)
helper.start()
helper.join()
while not Path("ended").exists():
    time.sleep(0.01)
os._exit(0)
"""


def test_a_worker_outlives_the_thread_that_started_it_and_ends_with_its_parent(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(IN_A_THREAD)
    process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment())
    worker = tmp_path / "worker"
    try:
        wait_for(lambda: worker.exists() and bool(worker.read_text()))
        pid = int(worker.read_text())
        time.sleep(0.2)
        os.kill(pid, 0)
        assert "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    finally:
        (tmp_path / "ended").touch()
        process.wait()
    wait_for(lambda: not Path(f"/proc/{pid}/cwd").exists(), timeout_s=10)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_a_stopped_worker_ends_with_its_parent_at_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment())
    worker = tmp_path / "worker"
    wait_for(lambda: worker.exists() and bool(worker.read_text()))
    handle = os.pidfd_open(int(worker.read_text()))
    try:
        process.kill()
        process.wait()
        deadline_s = time.monotonic() + 2
        while Path(f"/proc/{worker.read_text()}/cwd").exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not Path(f"/proc/{worker.read_text()}/cwd").exists()
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
