"""Signals to one process of a run: to a rank, which means all of them, and SIGKILL to the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.command_line import Shell, fault, wait_for
from tests.support.listening import processes_in
from tests.support.paths import environment

PIPELINE = ("parallel.plan.config=1-1", "parallel.plan.cuts=[2]")
PLANS = {
    "dp": ("parallel=dp", "parallel.devices=2"),
    "asynchronous": ("parallel=pipeline", *PIPELINE),
    "synchronous": ("parallel=gpipe", *PIPELINE),
}
LATE = {"dp": 6, "asynchronous": 12, "synchronous": 12}
"""A step of the last epoch, in which ranks of a pipeline agree too late to stop before its end."""
LIMIT_S = 2.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("late", "signum"), [(False, signal.SIGINT), (True, signal.SIGINT), (False, signal.SIGTERM)]
)
@pytest.mark.parametrize("plan", PLANS)
def test_a_signal_to_one_rank_ends_all(shell: Shell, plan: str, late: bool, signum: int) -> None:
    step = LATE[plan] if late else 2
    settings = ("hardware=cores", *PLANS[plan], fault([(step, signum)], rank=1))
    done = shell(*settings)
    name = signal.Signals(signum).name
    assert done.code == 128 + signum, done.err
    assert done.err.splitlines()[-1].startswith(f"stopped by {name}; run the same command again")
    (run,) = shell.runs()
    assert not (run / "DONE.json").exists()
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert shell(*settings).run == run, "it goes on"


def left_after(process: subprocess.Popen[str], cwd: Path, *, ready: Sequence[Path]) -> list[int]:
    """What still runs in a directory two seconds after the first process was killed there."""
    try:
        wait_for(lambda: any(mark.exists() for mark in ready) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        assert processes_in(cwd)
        process.kill()
        deadline_s = time.monotonic() + LIMIT_S
        while (left := processes_in(cwd)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return left
    finally:
        process.kill()
        for pid in processes_in(cwd):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp", "asynchronous"])
def test_ranks_end_with_their_launcher(shell: Shell, plan: str) -> None:
    """In a step that lasts minutes, with loader workers."""
    waiting = "callbacks={step: {_target_: tests.support.tinyhouse.LongStep, step: 2}}"
    process = shell.start("hardware=cores", *PLANS[plan], "data.num_workers=1", waiting)
    assert not left_after(process, shell.cwd, ready=[shell.cwd / f"in-step-{r}" for r in (0, 1)])


@pytest.mark.full
def test_ranks_end_with_a_launcher_that_is_killed_early(shell: Shell) -> None:
    """Before they have imported torch, which takes seconds."""
    process = shell.start("hardware=cores", *PLANS["dp"])

    def ranks() -> bool:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
        return sum(b"sparsepipe.launch.worker" in command for command in commands) == 2

    wait_for(ranks)
    here = shell.cwd / "here"
    here.touch()
    time.sleep(0.3)  # for Python itself to begin
    assert not left_after(process, shell.cwd, ready=[here])


SCRIPT = """
import pytorch_lightning as pl
from sparsepipe.strategies import DataParallelStrategy
from tests.support.pipeline_cases import QUIET, make_loader, make_net
from tests.support.tinyhouse import LongStep

pl.Trainer(**QUIET, devices=2, strategy=DataParallelStrategy(), max_epochs=1,
           callbacks=[LongStep(step=2)]).fit(make_net("dense"), make_loader("dense", batches=8))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")],
    ids=["Lightning", "torchrun"],
)
def test_ranks_of_a_script_end_with_what_has_started_them(
    tmp_path: Path, launcher: Sequence[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, *launcher, "script.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert not left_after(process, tmp_path, ready=[tmp_path / "in-step-1"])
