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
from torch.distributed import HashStore, TCPStore

from sparsepipe.runtime.failures import missing_ranks
from sparsepipe.runtime.failures.missing_ranks import Wait, WaitBoard

LAUNCHER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps a store, and says at which port."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
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
    assert not board.cut_off()
    goes_on.join()


def test_a_launcher_that_is_gone_is_known_at_once(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_ranks, "_ANSWER_S", 600.0)
    board = WaitBoard(store_of(launcher))
    assert not board.cut_off()
    launcher.kill()
    launcher.wait()
    started_s = time.monotonic()
    assert board.cut_off()
    assert time.monotonic() - started_s < 60


def wait_of(waiter: int, peer: int) -> Wait:
    return Wait(waiter=waiter, among=(peer,), what="the activation of minibatch 3")


def held_up_by(board: WaitBoard, waiter: int, peer: int) -> tuple[int, ...]:
    """Who waits for whom at the end of the chain that a wait in vain leads to."""
    wait = wait_of(waiter, peer)
    board.note(wait)
    last, missing = board.holding_up(wait)
    assert missing == last.among
    return (last.waiter, *missing)


def test_waits_lead_to_the_rank_that_does_not_wait() -> None:
    board = WaitBoard(HashStore())
    assert held_up_by(board, 1, 0) == (1, 0)
    assert held_up_by(board, 2, 1) == (1, 0)
    assert held_up_by(board, 3, 2) == (1, 0)
    assert held_up_by(board, 0, 3) == (1, 0)  # a circle


def test_a_wait_is_noted_at_half_its_limit_and_the_note_removed_when_it_ends() -> None:
    store = HashStore()
    board = WaitBoard(store)
    with board.noting(wait_of(1, 0), limit_s=0.2):
        while not store.check(["sparsepipe/waits/1"]):
            time.sleep(0.01)
        assert store.get("sparsepipe/waits/1")
    assert store.get("sparsepipe/waits/1") == b""
    assert held_up_by(board, 2, 1) == (2, 1)


def test_a_wait_that_is_met_in_time_needs_no_store() -> None:
    with WaitBoard(None).noting(wait_of(1, 0), limit_s=2.0):
        pass


class Hanging:
    """A store on a rank that stands still."""

    def set(self, key: str, value: str) -> None:
        time.sleep(30)

    def check(self, keys: list[str]) -> bool:
        time.sleep(30)
        return False


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    started_s = time.monotonic()
    assert held_up_by(WaitBoard(Hanging()), 1, 0) == (1, 0)
    assert time.monotonic() - started_s < 20
