"""The board at which ranks say what they wait for, on a store that has other things to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from sparsepipe.runtime.failures import missing_ranks
from sparsepipe.runtime.failures.missing_ranks import WaitBoard

LAUNCHER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    """A process that keeps a store, and says at which port."""
    command = [sys.executable, "-c", LAUNCHER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=True
    )
    yield process
    process.kill()
    process.communicate()


def store_of(launcher: subprocess.Popen[str]) -> TCPStore:
    assert launcher.stdout is not None
    return TCPStore("127.0.0.1", int(launcher.stdout.readline()), is_master=False)


def test_a_launcher_that_is_busy_for_a_while_is_not_taken_for_lost(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than other words with the store may take: a rank would blame itself."""
    assert missing_ranks._ANSWER_S > 2 * missing_ranks._STORE_LIMIT_S
    monkeypatch.setattr(
        missing_ranks, "_ANSWER_S", 60.0
    )  # however late this test gets to its next line
    board = WaitBoard(store_of(launcher))
    os.kill(launcher.pid, signal.SIGSTOP)
    goes_on = threading.Timer(
        2 * missing_ranks._STORE_LIMIT_S, launcher.send_signal, [signal.SIGCONT]
    )
    goes_on.start()
    assert board.answers()
    goes_on.join()


def test_a_launcher_that_is_gone_is_known_at_once(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_ranks, "_ANSWER_S", 600.0)
    board = WaitBoard(store_of(launcher))
    assert board.answers()
    launcher.kill()
    launcher.wait()
    started_s = time.monotonic()
    assert not board.answers()
    assert time.monotonic() - started_s < 60
