"""Signals that wait while hosts are made, in a process with threads that take them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparsepipe.emulate import clear, machine
from sparsepipe.emulate.hosts import signals_held
from sparsepipe.emulate.layout import BLOCKS
from tests.support.namespace_cases import needs_namespaces

TERM, HUP = signal.SIGTERM, signal.SIGHUP


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals in the order in which this process receives them, instead of ending by them."""
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


def test_the_first_of_several_signals_is_raised_later(
    heard: list[int], arrivals: socket.socket
) -> None:
    with signals_held():
        send(arrivals, TERM, HUP, TERM)
        assert heard == []
    assert heard == [TERM]
    signal.raise_signal(HUP)
    assert heard == [TERM, HUP], "as before"


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


DEAD = "sparsepipe-71-900-1-0"
CABLE = "spe71c0"


@pytest.fixture
def _dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of a process that is no more, on a machine with nothing else."""
    monkeypatch.setattr(machine, "namespaces", lambda: [DEAD, "blue"])
    monkeypatch.setattr(machine, "interfaces", lambda: ["lo", CABLE])
    monkeypatch.setattr(machine, "owner_of", lambda pid: None)


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real one that only this process takes for a leftover: another's start lets it be."""
    mine = machine.owner_of(os.getpid())
    assert mine is not None
    name = f"sparsepipe-{mine.pid}-{mine.started}-{BLOCKS - 1}-0"
    there = machine.namespaces
    monkeypatch.setattr(machine, "namespaces", lambda: [n for n in there() if n == name])
    monkeypatch.setattr(machine, "interfaces", list)
    monkeypatch.setattr(machine, "owner_of", lambda pid: None)
    machine.do(("ip", "netns", "add", name))
    yield name
    monkeypatch.undo()
    if name in machine.namespaces():
        machine.do(("ip", "netns", "del", name))


def check_told(text: str, *names: str, why: str) -> None:
    assert text.count("WARNING") == 1
    assert f"an emulated cluster cannot be removed: {', '.join(names)}, since {why}" in text


@needs_namespaces
def test_leftovers_that_cannot_be_removed_are_warned_of_each_time(
    namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho Device or resource busy >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING"):
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        clear()
    check_told(caplog.text, namespace, why=f"`ip netns del {namespace}` failed: Device or resource")
    assert machine.namespaces() == [namespace]
    caplog.clear()
    with caplog.at_level("WARNING"):
        clear()
    assert not caplog.text
    assert machine.namespaces() == []


@pytest.mark.usefixtures("_dead")
def test_missing_permission_to_remove_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "may_administer", lambda: False)
    with caplog.at_level("WARNING"):
        clear()
    check_told(caplog.text, DEAD, CABLE, why="this process may not make network namespaces")
