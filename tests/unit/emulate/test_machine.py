"""What the machine says, and what is made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.emulate import machine
from sparsepipe.emulate.layout import Owner


@pytest.mark.parametrize(
    ("command", "said", "kind", "names"),
    [
        ("ip netns add x", "mkdir /run/netns failed: Permission denied", "NotPermitted", "root"),
        ("tc -n a qdisc add dev data root tbf rate 1bit", "Error: Specified qdisc kind is unknown.",
         "HardwareError", "sch_tbf"),
        ("ip addr add 198.18.0.1 dev x", 'Cannot find device "x"', "HardwareError", "ip link"),
    ],
)  # fmt: skip
def test_a_failing_command_names_the_remedy(command: str, said: str, kind: str, names: str) -> None:
    error = machine.refusal(tuple(command.split()), said)
    assert type(error).__name__ == kind
    assert said.split(":", maxsplit=1)[0] in error.message
    assert command in error.message
    assert names in error.remedy
    assert "hardware.network=loopback" in error.remedy


def test_owners_live_as_long_as_their_process() -> None:
    mine = machine.owner_of(os.getpid())
    assert mine is not None
    assert mine.pid == os.getpid()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        owner = Owner(pid=child.pid, started=int(stat.rpartition(")")[2].split()[19]))
        assert machine.owner_of(child.pid) == owner
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for it yet
        assert machine.owner_of(child.pid) is None
    assert machine.owner_of(child.pid) is None
