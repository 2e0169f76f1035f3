"""Emulated trainings that are ended on their way and begun again, by themselves or by somebody.

On hosts of their own where this process may make them, else on this machine's loopback.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, fault
from tests.support.emulated_cases import ACTIVATION_BYTES, BACKWARD_S, FORWARD_S, hosts
from tests.support.namespace_cases import PERMITTED, left

pytestmark = pytest.mark.full

NETWORK = "namespaces" if PERMITTED else "loopback"
RATE, MINIBATCHES, LIMITED = 4e6, 24, "hosts as network namespaces"
PIPELINE = (
    "parallel=pipeline",
    "parallel.plan.config=1-2",
    "parallel.plan.cuts=[2]",
    f"hardware.network={NETWORK}",
)


def asked(shell: Shell, *overrides: str) -> list[str]:
    return [*hosts(shell.cwd, bytes_per_s=RATE), *PIPELINE, *overrides]


def check(run: Path, *, starts: int) -> None:
    """The result is that of a whole epoch, at the pace of the link or of the first stage."""
    result: dict[str, Any] = read_json(run / "result.json")
    assert (result["kind"], result["network"]) == ("emulated", NETWORK)
    assert (result["minibatches"], result["starts"], result["ranks"]) == (MINIBATCHES, starts, 3)
    computing_s, crossing_s = 2 * (FORWARD_S + BACKWARD_S), ACTIVATION_BYTES / RATE
    slowest_s = crossing_s if PERMITTED else computing_s
    assert slowest_s >= computing_s
    assert result["epoch_s"] > (MINIBATCHES - 1) * slowest_s
    assert (run / "DONE.json").exists()


def test_ranks_begin_again_on_the_same_hosts(shell: Shell) -> None:
    killed = fault([(3, signal.SIGKILL)], rank=1)
    process = shell.start(*asked(shell, killed, "parallel.max_restarts=1"))
    ended = shell.wait(process)
    assert (shell.cwd / "fault-at-3").exists(), "it did not come about"
    assert "rank 1 (stage 1)" in ended.err
    assert "restart 1 of 1" in ended.err
    assert ended.err.count(LIMITED) == PERMITTED, "they are made once"
    check(ended.run, starts=1)
    assert left(process.pid) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_the_same_command_begins_again(shell: Shell, signum: signal.Signals) -> None:
    """What is left of hosts when the command is killed goes when it is given again."""
    command = asked(shell, fault([(3, signum)], parent=True))
    process = shell.start(*command)
    first = shell.wait(process)
    assert (shell.cwd / "fault-at-3").exists(), "it did not come about"
    died = signum is signal.SIGKILL
    assert first.code == (-signum if died else 128 + signum), first.err
    assert bool(left(process.pid)) == (died and PERMITTED)
    begun = shell.runs()  # an epoch that was stopped leaves nothing worth a directory
    assert len(begun) == died
    assert not any((run / "DONE.json").exists() for run in begun)
    again = shell(*command)
    assert shell.runs() == [again.run]
    check(again.run, starts=1 + died)
    assert left(process.pid) == []
    assert ("removing what a killed process has left" in again.err) == (died and PERMITTED)
