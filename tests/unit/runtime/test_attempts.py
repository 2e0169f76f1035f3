"""Ranks that begin again: with real processes, and which failures are worth it."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from sparsepipe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HardwareError,
    OutputError,
    PlanError,
    SparsePipeError,
    TransportError,
)
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.runtime.launch import is_transient, launch, run_with_restarts

PROLOGUE = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
begun = Path(f"begun{rank}")
begun.write_text(begun.read_text() + "x" if begun.exists() else "x")
number = len(begun.read_text())
other = Path(f"begun{1 - rank}")
while not other.exists() or len(other.read_text()) < number:  # else it is ended before it begins
    time.sleep(0.02)
"""


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a script in two ranks; returns how often each has begun."""
    monkeypatch.chdir(tmp_path)

    def start(script: str, *, max_restarts: int) -> None:
        path = tmp_path / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(script))
        once = partial(
            launch,
            [sys.executable, str(path)],
            ranks=2,
            threads_per_rank=1,
            reports=tmp_path / "reports",
            grace_s=5,
        )
        run_with_restarts(once, max_restarts=max_restarts)

    return start


def begun(directory: Path) -> list[int]:
    return [len((directory / f"begun{rank}").read_text()) for rank in range(2)]


@pytest.mark.full
def test_all_ranks_begin_again_and_meet_each_other(attempts, tmp_path: Path) -> None:
    """The second attempt's ranks join a group, which the first one's dead took part in."""
    attempts(
        """
        import torch
        import torch.distributed as dist
        from sparsepipe.runtime.collectives import process_group
        process_group.join("gloo", timeout_s=30)
        value = torch.tensor([rank + 1])
        dist.all_reduce(value)
        assert value.item() == 3
        if number == 1 and rank == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()
        process_group.leave()
        """,
        max_restarts=1,
    )
    assert begun(tmp_path) == [2, 2]


@pytest.mark.full
def test_reports_of_an_earlier_attempt_do_not_mislead(attempts, tmp_path: Path) -> None:
    with pytest.raises(SparsePipeError, match="rank 0 ended with exit code 3"):
        attempts(
            """
            from sparsepipe.runtime.failures.rank_reports import exit_immediately
            if number == 1 and rank == 1:
                exit_immediately(ValueError("the first attempt's"))
            if number == 2 and rank == 0:
                sys.exit(3)
            time.sleep(60)
            """,
            max_restarts=1,
        )
    assert begun(tmp_path) == [2, 2]


def test_a_mistake_is_not_made_again(attempts, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not like this"):
        attempts(
            """
            from sparsepipe.errors import ConfigError
            from sparsepipe.runtime.failures.rank_reports import exit_immediately
            if rank:
                exit_immediately(ConfigError("not like this", remedy="but like that"))
            time.sleep(60)
            """,
            max_restarts=3,
        )
    assert begun(tmp_path) == [1, 1]


@pytest.mark.full
def test_what_cannot_be_sent_is_not_sent_again(attempts, tmp_path: Path) -> None:
    """The peer, which waits for it in vain, is not blamed, nor is its own complaint told."""
    with pytest.raises(ConfigError, match="minibatch 0 holds what cannot be pickled"):
        attempts(
            """
            from sparsepipe.runtime.collectives import process_group
            from sparsepipe.runtime.failures.rank_reports import exit_immediately
            from sparsepipe.runtime.transport import Kind, Message, Network
            from sparsepipe.schedule import Plan
            process_group.join("gloo", timeout_s=30)
            plan = Plan.of(config="1-1", cuts=[1], num_layers=2)
            network = Network(plan, rank, timeout_s=30)
            try:
                if rank:
                    network.receive(Kind.ACTIVATION, 0, minibatch=0)
                network.send(Kind.ACTIVATION, 1, Message(minibatch=0, tree=lambda: 3))
            except Exception as error:
                exit_immediately(error)
            """,
            max_restarts=3,
        )
    assert begun(tmp_path) == [1, 1]


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        (SparsePipeError, True),
        (TransportError, True),
        (ConfigError, False),
        (PlanError, False),
        (DataError, False),
        (HardwareError, False),
        (CheckpointError, False),
        (OutputError, False),
    ],
)
def test_which_failures_may_pass(kind: type[SparsePipeError], again: bool) -> None:
    assert is_transient(kind("it", remedy="mend it")) is again
    calls = []

    def fails() -> None:
        calls.append(kind)
        raise kind("it", remedy="mend it")

    with pytest.raises(kind):
        run_with_restarts(fails, max_restarts=2)
    assert len(calls) == (3 if again else 1)


def test_a_stop_is_no_failure() -> None:
    calls = []

    def stops() -> None:
        calls.append(None)
        raise Stopped(2)

    with pytest.raises(Stopped):
        run_with_restarts(stops, max_restarts=2)
    assert len(calls) == 1
