"""Data parallelism through the command line: what it computes and how it fails."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sparsepipe.errors import ConfigError
from sparsepipe.launch.execute import failing_as_rank
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed, fault, rows, wait_for, weights
from tests.support.processes import outcomes
from tests.support.resolved import resolved

Job = Callable[..., Path]
DP = ("parallel=dp", "parallel.devices=2")
SAVE = "callbacks={save: {_target_: tests.support.tinyhouse.SaveWeights}}"


@pytest.mark.usefixtures("networks_for_ranks")
def test_equals_one_process_with_the_whole_batch(job: Job) -> None:
    run = job(*DP, SAVE, "data.batch_size=4")
    alone = job("parallel=single", "data.batch_size=8")
    torch.testing.assert_close(weights(run), weights(alone), rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(rows(run), rows(alone), strict=True):
        for name in ("train/loss", "train/accuracy", "val/loss", "val/accuracy"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-5)
    assert read_json(run / "result.json")["ranks"] == 2
    same_on_both(Path.cwd())
    # Nine test shapes on two ranks: unequal numbers of batches, and none counted twice.
    evaluated = job("task=evaluate", f"checkpoint={run}", "parallel=single", "data.batch_size=4")
    for name in ("test/accuracy", "test/loss"):
        value = read_json(run / "result.json")[name]
        assert value == pytest.approx(read_json(evaluated / "result.json")[name], rel=1e-5)


def same_on_both(directory: Path) -> None:
    first, second = (torch.load(directory / f"rank{rank}.pt") for rank in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
def test_sweep_of_world_sizes(shell: Shell) -> None:
    """Under an outer sweep every job has its own processes, as many as its settings say."""
    swept = shell.sweep(
        "parallel=dp,single",
        "parallel.devices=2,1",
        "trainer.max_epochs=1",
    )
    # dp on two, dp on one, single on two (refused, the sweep goes on), single on one.
    assert swept.code == 2
    assert "no strategy is set" in swept.err
    results = [read_json(run / "result.json") for run in shell.runs()]
    assert sorted((r["parallel.devices"], r["ranks"]) for r in results) == [(1, 1), (1, 1), (2, 2)]
    assert [line for line in swept.out.splitlines() if line.startswith("/")]
    assert not (shell.cwd / "multirun").exists()


@pytest.mark.full
def test_under_torchrun(shell: Shell) -> None:
    process = shell.torchrun(2, *DP, SAVE, "model.norm=true", "trainer.max_epochs=1")
    assert process.returncode == 0, process.stderr
    (run,) = shell.runs()
    assert read_json(run / "result.json")["ranks"] == 2
    assert (run / "DONE.json").exists()
    same_on_both(shell.cwd)  # BatchNorm's running statistics included
    assert process.stdout == f"{run}\n", "one rank speaks"


@pytest.mark.full
def test_errors_under_torchrun_are_reported_once(shell: Shell) -> None:
    refused = shell.torchrun(2, *DP, "trainer.precision=foo")
    assert refused.returncode
    assert refused.stderr.count("Lightning refuses the settings") == 1
    assert "stopped by" not in refused.stderr
    assert first_exit_code(refused.stderr) == 2
    refused = shell.torchrun(2, *DP, "hydra.mode=MULTIRUN")
    assert refused.stderr.count("a sweep (-m) cannot be started with torchrun") == 1
    assert "stopped by" not in refused.stderr
    assert first_exit_code(refused.stderr) == 2


def first_exit_code(told: str) -> int:
    """Of the first rank that torchrun saw ended; it may end the others wherever they are."""
    return int(re.findall(r"exitcode\s*: (-?\d+)", told.partition("Root Cause")[2])[0])


@pytest.fixture
def heeded() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class EndedMeanwhile(dist.HashStore):
    """The agent ends this process while it asks here."""

    def add(self, key: str, amount: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().add(key, amount)


def test_a_rank_that_fails_under_torchrun_reports_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeded: None
) -> None:
    monkeypatch.setattr(process_group, "_stores", {("here", "0"): EndedMeanwhile()})
    with pytest.raises(ConfigError) as told, SignalWatch(), failing_as_rank(RunDir(tmp_path), {}):
        raise ConfigError("a mistake", remedy="mend it")
    assert told.value.__notes__ == ["rank 0"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "the command is yet to print it"


def test_only_the_failed_rank_reports_and_not_those_ended_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeded: None
) -> None:
    monkeypatch.setattr(process_group, "_stores", {("here", "0"): dist.HashStore()})
    assert not process_group.other_rank_failed(announced=True)  # as the other one
    # Not Stopped, of which the first rank would tell.
    with pytest.raises(SystemExit) as end, SignalWatch(), failing_as_rank(RunDir(tmp_path), {}):
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 143


@pytest.mark.full
def test_data_may_take_longer_than_the_limit_of_a_collective(shell: Shell) -> None:
    done = shell.torchrun(
        2, *DP, "+data.prepare_s=20", "parallel.strategy.timeout_s=15", "trainer.max_epochs=1"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "message"),
    [
        pytest.param(signal.SIGKILL, "rank 1 was killed by SIGKILL", id="killed"),
        pytest.param(0, "rank 1 raised ValueError", id="raises"),
    ],
)
def test_failing_rank(shell: Shell, signum: int, message: str) -> None:
    failed = shell(*DP, fault([(3, signum)], rank=1))
    assert failed.code == 1
    assert message in failed.err
    assert failed.err.count("remedy:") == 1
    assert failed.err.count("Traceback") == (1 if signum == 0 else 0)
    assert str(shell.cwd) not in failed.out


@pytest.mark.full
def test_ranks_that_take_longer_than_the_grace_period(shell: Shell) -> None:
    sleep = "callbacks={sleep: {_target_: tests.support.tinyhouse.LongStep, step: 5}}"
    process = shell.start(*DP, sleep, "parallel.grace_s=2")
    wait_for(lambda: all((shell.cwd / f"in-step-{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGTERM)
    stopped = shell.wait(process)
    assert stopped.code == 143
    assert "ranks 0, 1 were ended after 2 s without a checkpoint" in stopped.err
    assert "raise parallel.grace_s" in stopped.err


@pytest.mark.full
def test_rank_that_hangs(shell: Shell) -> None:
    failed = shell(
        *DP, fault([(3, signal.SIGSTOP)], rank=1), "parallel.strategy.timeout_s=15", timeout_s=180
    )
    assert failed.code == 1
    assert "rank 1 did not answer" in failed.err


def train_in(rank: int, directories: list[Path]) -> None:
    from sparsepipe.runs.rundir import RunDir

    config = composed("experiment=tiny", "trainer.max_epochs=2", "hardware.accelerator=cpu", *DP)
    run = resolved(config, directory=RunDir(directories[rank]))
    with run.watch:
        run.task.run(run)


@pytest.mark.parametrize(
    "missing", ["last.ckpt", pytest.param("fitted.json", marks=pytest.mark.full)]
)
def test_ranks_that_see_different_files_are_refused(
    job: Callable[..., Path], tmp_path: Path, missing: str
) -> None:
    """As nodes do whose outputs are not on a shared directory."""
    shutil.copytree(job("trainer.max_epochs=1"), tmp_path / "other")
    run = next(Path("outputs/tiny").glob("[!.]*")).absolute()
    (tmp_path / "other" / "checkpoints" / missing).unlink()
    found = outcomes(train_in, 2, [run, tmp_path / "other"], limit_s=60)
    for outcome in found:
        assert isinstance(outcome.error, ConfigError), str(outcome)
        assert "find different checkpoints" in outcome.error.message
        assert "all nodes share" in outcome.error.remedy
