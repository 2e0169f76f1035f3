"""Real namespaces: what they let through, and that nothing stays, even of killed processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sparsepipe.emulate import NotPermitted, announce_hosts, emulated_hosts, machine, set_limits
from sparsepipe.emulate.hosts import remove_leftovers
from sparsepipe.emulate.layout import Layout, Station
from sparsepipe.errors import HardwareError
from tests.support.namespace_cases import PROGRAMS, cluster, left, needs_namespaces, start


def inside(station: Station, program: str, *arguments: object) -> subprocess.Popen[str]:
    """A program of this directory on a host."""
    command = ["ip", "netns", "exec", station.namespace, sys.executable, str(PROGRAMS / program)]
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def seconds_of(source: Station, target: Station, size_bytes: int) -> float:
    """How long bytes take from one host to another."""
    with inside(target, "receive.py", target.address, size_bytes) as receiver:
        assert receiver.stdout is not None
        port = int(receiver.stdout.readline())
        with inside(source, "send.py", target.address, port, size_bytes) as sender:
            assert sender.stdout is not None
            return float(sender.stdout.read())


def both_ways(layout: Layout, size_bytes: int) -> list[float]:
    """How long bytes take from each of two hosts to the other, at once."""
    a, b = layout.stations
    found: list[float] = []
    ways = [
        threading.Thread(target=lambda p=pair: found.append(seconds_of(*p, size_bytes)))
        for pair in ((a, b), (b, a))
    ]
    for way in ways:
        way.start()
    for way in ways:
        way.join(120)
    assert len(found) == 2
    return found


def sent_bytes(station: Station) -> int:
    """What has left a host by the interface that is limited."""
    told = subprocess.run(
        ["ip", "-n", station.namespace, "-s", "-j", "link", "show", "data"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(json.loads(told.stdout)[0]["stats64"]["tx"]["bytes"])


RATE = 2e6  # of bytes a second, so that a busy machine is still faster


@needs_namespaces
def test_bytes_take_the_time_of_the_link_both_ways_at_once() -> None:
    """A bucket that is full at the start makes it less, headers and a busy machine more."""
    size = 4_000_000
    with emulated_hosts(cluster(bytes_per_s=10 * RATE), time_scale=10) as layout:
        due_s = (size - layout.burst_bytes) / RATE
        found = both_ways(layout, size)
        assert all(due_s <= found_s for found_s in found), (due_s, found)
        a, _ = layout.stations
        before = sent_bytes(a)
        assert before > size
        seconds_of(a, a, size)
        assert sent_bytes(a) - before < size / 100, "no link limits what stays on a host"


@needs_namespaces
def test_hosts_reach_the_launcher_and_no_other_machine() -> None:
    with emulated_hosts(cluster()) as layout:
        for station in layout.stations:
            routes = subprocess.run(
                ["ip", "-n", station.namespace, "route"], capture_output=True, text=True, check=True
            ).stdout.split("\n")
            assert sorted(line.split(" proto")[0] for line in routes if line) == [
                "10.77.0.0/24 dev data",
                f"{station.launcher} dev control",
            ]
            where = station.launcher, station.address
            with inside(station, "reach.py", *where) as process:
                assert process.stdout is not None
                assert process.stdout.read() == "launcher refuses, own address refuses"


def disciplines(layout: Layout) -> list[str]:
    """What limits the ends of all links: of each host, and of the bridge towards it."""
    ends = [(s.namespace, "data") for s in layout.stations]
    ends += [(layout.switch, s.port) for s in layout.stations]
    found = []
    for namespace, interface in ends:
        told = subprocess.run(
            ["tc", "-n", namespace, "-j", "qdisc", "show", "dev", interface],
            capture_output=True,
            text=True,
            check=True,
        )
        found += [each["kind"] for each in json.loads(told.stdout)]
    return found


@needs_namespaces
def test_ranks_that_start_anew_find_links_limited_or_not() -> None:
    """Those before may have ended at any time, and the network stays."""
    with emulated_hosts(cluster()) as layout, announce_hosts(layout, ["host0", "host1"]):
        assert disciplines(layout) == ["tbf"] * 4
        for lifted, kind in ((True, "noqueue"), (False, "tbf")):
            for _ in range(2):
                set_limits(lifted=lifted)
                assert disciplines(layout) == [kind] * 4


@needs_namespaces
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_stays_whatever_ends_the_block(error: type[BaseException]) -> None:
    sleepers = []

    def block() -> None:
        with emulated_hosts(cluster()) as layout:
            cables = [station.cable for station in layout.stations]
            assert sorted(left(os.getpid())) == sorted((*layout.namespaces, *cables))
            sleepers.append(inside(layout.stations[0], "sleep.py"))
            assert sleepers[0].stdout is not None
            sleepers[0].stdout.readline()
            raise error

    with pytest.raises(error):
        block()
    assert left(os.getpid()) == []
    assert sleepers[0].wait(10) == -signal.SIGKILL, "what lives on a host ends with it"


@needs_namespaces
def test_nothing_stays_of_what_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(command: tuple[str, ...]) -> None:
        if command[-1] == "up" and command[0] == "ip" and command[-2] == "control":
            raise HardwareError("the last but one fails", remedy="none")
        plain(command)

    plain = machine.do
    monkeypatch.setattr(machine, "do", failing)
    with pytest.raises(HardwareError, match="last but one"), emulated_hosts(cluster()):
        pytest.fail("it has begun")
    assert left(os.getpid()) == []


@needs_namespaces
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_everything(signum: signal.Signals) -> None:
    with start("own_a_cluster.py") as process:
        assert process.stdout is not None
        resident = int(process.stdout.readline())
        assert left(process.pid)
        process.send_signal(signum)
        process.wait(60)
        assert left(process.pid) == []
        assert not Path(f"/proc/{resident}").exists()


@needs_namespaces
def test_two_signals_while_it_is_made_remove_everything() -> None:
    """The second would end the process at once, were it heard."""
    with start("stopped_while_making.py") as process:
        said, _ = process.communicate(timeout=120)
        assert said in ("SIGTERM\n", "SIGHUP\n")
        assert process.returncode == 0
        assert left(process.pid) == []


@needs_namespaces
def test_the_next_start_removes_leftovers_of_a_killed_process() -> None:
    with start("own_a_cluster.py") as killed, start("own_a_cluster.py") as living:
        assert killed.stdout is not None
        assert living.stdout is not None
        resident, other = int(killed.stdout.readline()), int(living.stdout.readline())
        killed.kill()
        killed.wait(10)
        assert left(killed.pid), "nobody has removed it yet"
        kept = left(living.pid)
        with emulated_hosts(cluster()):
            assert left(killed.pid) == []
            assert left(living.pid) == kept, "its process runs"
        assert not runs(resident)
        assert runs(other)
        living.kill()
        living.wait(10)
        remove_leftovers()
        assert left(living.pid) == []
        assert not runs(other)


def runs(pid: int) -> bool:
    """Whether a process, which may have no parent to reap it, has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_without_permission_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "may_administer", lambda: False)
    with pytest.raises(NotPermitted, match="may not make"), emulated_hosts(cluster()):
        pytest.fail("it has begun")
    assert left(os.getpid()) == []


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
