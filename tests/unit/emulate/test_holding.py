"""Signals that wait while hosts are made, in a process with threads that take them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from sparsepipe.emulate.holding import signals_held

TERM, HUP = signal.SIGTERM, signal.SIGHUP


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals in the order in which this process hears them, instead of ending by them."""
    numbers: list[int] = []
    before = {s: signal.signal(s, lambda number, _: numbers.append(number)) for s in (TERM, HUP)}
    yield numbers
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def arrivals() -> Iterator[socket.socket]:
    """Has a byte for each signal that a thread has taken; there is one that takes all."""
    end = threading.Event()
    other = threading.Thread(target=end.wait, args=(120,))
    other.start()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(30)
    before = signal.set_wakeup_fd(theirs.fileno())
    yield ours
    signal.set_wakeup_fd(before)
    end.set()
    other.join()
    ours.close()
    theirs.close()


def send(arrivals: socket.socket, *signums: signal.Signals) -> None:
    for signum in signums:
        os.kill(os.getpid(), signum)
        assert arrivals.recv(1) == bytes([signum])


def test_of_several_the_first_is_heard_and_later(heard: list[int], arrivals: socket.socket) -> None:
    with signals_held():
        send(arrivals, TERM, HUP, TERM)
        assert heard == []
    assert heard == [TERM]
    signal.raise_signal(HUP)
    assert heard == [TERM, HUP], "as before"


def test_none_is_heard_where_none_came(heard: list[int]) -> None:
    with signals_held():
        pass
    assert heard == []


def test_what_is_ignored_stays_so(heard: list[int]) -> None:
    signal.signal(HUP, signal.SIG_IGN)  # as under nohup; it is the lower number
    with signals_held():
        os.kill(os.getpid(), HUP)
        os.kill(os.getpid(), TERM)
    assert heard == [TERM]
    assert signal.getsignal(HUP) is signal.SIG_IGN


def test_a_handler_that_raises_does_so_after_the_work(arrivals: socket.socket) -> None:
    done = []

    def work() -> None:
        with signals_held():
            send(arrivals, signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_commands_do_not_get_them() -> None:
    """A terminal sends them to all of its processes."""
    sleep = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]
    with signals_held(), subprocess.Popen(sleep, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()
        assert process.wait(30) == -signal.SIGKILL


def test_in_a_thread_nothing_is_taken_over(heard: list[int]) -> None:
    done = []

    def work() -> None:
        with signals_held():
            done.append(signal.getsignal(TERM))

    handler = signal.getsignal(TERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert done == [handler]
    assert heard == []
