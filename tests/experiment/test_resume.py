"""Runs that are killed or stopped go on and end as if nothing had happened."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest
import torch

from tests.experiment.conftest import Shell, checkpoint, rows, wait_for, weights

SINGLE = ("trainer.max_epochs=3", "model.dropout=0.5", "data.train_size=40")
DP = (*SINGLE, "parallel=dp", "parallel.devices=2", "model.norm=true")
BOTH = pytest.mark.parametrize("arguments", [SINGLE, DP], ids=["single", "dp"])


def fault(signum: int, *, step: int, parent: bool) -> str:
    return (
        f"callbacks={{fault: {{_target_: tinyhouse.Fault, step: {step}, signum: {signum}, "
        f"parent: {parent}}}}}"
    )


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    @functools.cache
    def run(arguments: tuple[str, ...]) -> Path:
        return Shell(tmp_path_factory.mktemp("undisturbed"))(*arguments).run

    return run


def assert_whole(shell: Shell, arguments: tuple[str, ...], expected: Path) -> None:
    """The rerun finishes the one run, with every epoch once and an undisturbed run's weights."""
    run = shell(*arguments).run
    assert shell.runs() == [run]
    assert [row["epoch"] for row in rows(run)] == ["0", "1", "2"]
    assert (run / "DONE.json").exists()
    assert torch.equal(weights(run), weights(expected))
    assert [row["val/loss"] for row in rows(run)] == [row["val/loss"] for row in rows(expected)]


@BOTH
def test_killed(shell: Shell, undisturbed, arguments: tuple[str, ...]) -> None:
    dp = arguments is DP
    faulty = (*arguments, fault(signal.SIGKILL, step=7 if dp else 13, parent=dp))
    # The launching process dies; the ranks notice that within half a second.
    assert shell(*faulty, f"data.delay_s={0.05 * dp}").code == -signal.SIGKILL
    assert len(rows(shell.runs()[0])) == 1
    assert not (shell.runs()[0] / "DONE.json").exists()
    assert_whole(shell, (*faulty, f"data.delay_s={0.05 * dp}"), undisturbed(arguments))


@BOTH
def test_interrupted_within_an_epoch(shell: Shell, undisturbed, arguments: tuple[str, ...]) -> None:
    dp = arguments is DP
    faulty = (
        *arguments,
        fault(signal.SIGINT, step=6 if dp else 13, parent=dp),
        f"data.delay_s={0.03 * dp}",
    )
    stopped = shell(*faulty)
    assert stopped.code == 130, stopped.err
    assert "run the same command again" in stopped.err
    assert "Traceback" not in stopped.err
    place = checkpoint(shell.runs()[0])["callbacks"]["RunCheckpoint"]
    assert place["epoch"] == 1
    assert place["batches"] > 0
    assert_whole(shell, faulty, undisturbed(arguments))


def test_terminated_with_loader_processes(shell: Shell) -> None:
    arguments = (*SINGLE, "data.num_workers=1", fault(signal.SIGTERM, step=13, parent=False))
    assert shell(*arguments).code == 143
    place = checkpoint(shell.runs()[0])["callbacks"]["RunCheckpoint"]
    assert (place["epoch"], place["batches"]) == (1, 4)


def test_second_interrupt_ends_at_once(shell: Shell) -> None:
    process = shell.start(*DP, "data.delay_s=5")
    wait_for(lambda: any((run / ".ranks").exists() for run in shell.runs()))
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert shell.wait(process, timeout_s=20).code == 130
