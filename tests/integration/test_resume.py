"""Runs that are killed or stopped go on and end as if nothing had happened."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, fault, rows, wait_for, weights

SINGLE = ("trainer.max_epochs=3", "model.dropout=0.5", "data.train_size=40")
DP = (*SINGLE, "parallel=dp", "parallel.devices=2", "model.norm=true")
TRAINED = {"train/loss", "train/accuracy", "train/objective"}
Job = Callable[..., Path]


def assert_whole(shell: Shell, run: Path, expected: Path) -> None:
    """The rerun finished the one run, with every epoch once and an undisturbed run's weights."""
    assert run in shell.runs()
    assert [row["epoch"] for row in rows(run)] == ["0", "1", "2"]
    assert (run / "DONE.json").exists()
    ours, theirs = checkpoint(run)["state_dict"], checkpoint(expected)["state_dict"]
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    for name in logged(run):
        assert logged(run)[name] == logged(expected)[name], name


def logged(run: Path) -> dict[str, list[str]]:
    """The epochs' values that were logged in training, validation and test."""
    names = {name for row in rows(run) for name in row if "/" in name or name == "lr"}
    timed = {name for name in names if name.startswith("time/") or "_per_s" in name}
    return {name: [row.get(name, "") for row in rows(run)] for name in names - timed}


NOTING = ("model=own", "model._target_=tests.support.tinyhouse.Noting", "trainer.max_epochs=3")
SHORT, LONG = ("+model.odd=false", "data.train_size=160"), ("data.train_size=320",)
RECOMPUTED = "parallel.strategy.recompute=all"
STOPPED: dict[str, tuple[str, ...]] = {
    "dp": ("parallel=dp", "parallel.devices=2", "data.train_size=48"),
    "single": ("parallel=single", "data.train_size=24", "+model.plateau=true"),
    "1-2": ("parallel=gpipe", *SHORT),
    "2-1": ("parallel=gpipe", *LONG),
    "1-2 running": (
        "parallel=sync_1f1b",
        *SHORT,
        RECOMPUTED,
        "parallel.strategy.batch_norm=running",
    ),
    "2-1 deferred": ("parallel=gpipe", *LONG, RECOMPUTED, "parallel.strategy.batch_norm=deferred"),
}


@pytest.mark.usefixtures("networks_for_ranks")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n != "dp")) for n in STOPPED]
)
def test_a_stop_within_an_epoch_changes_no_bit(job: Job, name: str) -> None:
    """Neither of statistics that differ between ranks, nor of anything that is logged."""
    settings, step = (*NOTING, *STOPPED[name], "task.test=false"), 8
    if "-" in name:
        cuts = ("parallel.plan.cuts=[1]", f"parallel.plan.config={name[:3]}", "hardware=cores")
        settings = (*settings, *cuts, "parallel.strategy.microbatches=2", "data.delay_s=0.005")
        step = 44
    expected = job(*settings, "name=undisturbed")
    faulty = (*settings, fault([(step, signal.SIGTERM)], parent=name != "single"))
    with pytest.raises(Stopped):
        job(*faulty)
    (run,) = {path.parent for path in Path("outputs").glob("tiny/*/config.yaml")}
    place = checkpoint(run)["callbacks"]["RunCheckpoint"]
    assert place["epoch"] == 1
    assert place["batches"] > 0
    run = job(*faulty)
    ours, theirs = checkpoint(run)["state_dict"], checkpoint(expected)["state_dict"]
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set()
    assert logged(run) == logged(expected)
    assert {"train/total", "train/first", "train/ended", "train/last"} <= logged(run).keys()


@pytest.mark.full
def test_killed(shell: Shell, job: Job, tmp_path: Path) -> None:
    faulty = (*SINGLE, fault([(13, signal.SIGKILL)]))
    assert shell(*faulty).code == -signal.SIGKILL
    assert len(rows(shell.runs()[0])) == 1
    assert not (shell.runs()[0] / "DONE.json").exists()
    run = job(*faulty)
    assert_whole(shell, run, job(*SINGLE, "name=undisturbed"))


@pytest.mark.full
def test_dp_killed_and_interrupted(shell: Shell) -> None:
    # The launching process is hit; the ranks notice its death.
    faulty = (*DP, fault([(1, signal.SIGKILL), (7, signal.SIGINT)], parent=True))
    assert shell(*faulty).code == -signal.SIGKILL
    assert_stopped(shell, faulty)
    run = shell(*faulty).run
    assert_whole(shell, run, shell(*DP, "name=undisturbed").run)


def assert_stopped(shell: Shell, arguments: tuple[str, ...]) -> None:
    stopped = shell(*arguments)
    assert stopped.code == 130, stopped.err
    assert "run the same command again" in stopped.err
    assert "Traceback" not in stopped.err
    (run,) = shell.runs()
    place = checkpoint(run)["callbacks"]["RunCheckpoint"]
    assert place["epoch"] == 1
    assert place["batches"] > 0


@pytest.mark.full
def test_terminated_with_loader_processes(shell: Shell) -> None:
    arguments = (*SINGLE, "data.num_workers=1", fault([(13, signal.SIGTERM)]))
    assert shell(*arguments).code == 143
    place = checkpoint(shell.runs()[0])["callbacks"]["RunCheckpoint"]
    assert (place["epoch"], place["batches"]) == (1, 4)


@pytest.mark.full
def test_second_interrupt_ends_at_once(shell: Shell) -> None:
    """The first asks for an end after a step, which here takes longer than anybody waits."""
    sleep = "callbacks={sleep: {_target_: tests.support.tinyhouse.LongStep, step: 3}}"
    process = shell.start(*DP, sleep)
    wait_for(lambda: all((shell.cwd / f"in-step-{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGINT)
    # Passed on to one of them only, it would be the first for the other.
    wait_for(lambda: all((shell.cwd / f"heard-{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGINT)
    ended = shell.wait(process, timeout_s=60)
    assert ended.code == 130
    assert "writing a checkpoint after this step" in ended.err


@pytest.mark.full
def test_interrupted_while_it_tests(shell: Shell) -> None:
    long = (
        "trainer.max_epochs=1",
        "callbacks={long: {_target_: tests.support.tinyhouse.LongTest}}",
    )
    process = shell.start(*long)
    wait_for((shell.cwd / "in-test").exists)
    process.send_signal(signal.SIGINT)
    stopped = shell.wait(process, timeout_s=60)
    assert stopped.code == 130, stopped.err
    assert "run the same command again" in stopped.err
    assert "Traceback" not in stopped.err
    run = shell(*long).run
    assert shell.runs() == [run]
    assert [row["epoch"] for row in rows(run)] == ["0"]
    result = read_json(run / "result.json")
    assert (result["steps"], result["epochs"]) == (8, 1)
    assert result["test/accuracy"] == float(rows(run)[0]["test/accuracy"])


@pytest.mark.parametrize(
    "steps", [(9, 13), pytest.param((3, 10, 19, 20, 29), marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize(
    "settings",
    [
        ("optim=sgd_onecycle", "optim.optimizer.lr=0.1", "trainer.gradient_clip_val=1.0"),
        *(
            pytest.param(settings, marks=pytest.mark.full)
            for settings in (
                (),
                ("trainer.max_steps=25",),
                ("trainer.val_check_interval=0.5",),
                ("trainer.check_val_every_n_epoch=2",),
                ("trainer.accumulate_grad_batches=2",),
                ("optim=adamw", "data.val_size=0", "trainer.limit_train_batches=7"),
                ("trainer.precision=bf16-mixed", "model.norm=true", "data.train_size=38"),
            )
        ),
    ],
    ids=lambda settings: settings[0] if settings else "plain",
)
def test_going_on_changes_nothing(
    job: Job, settings: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    """Ten steps an epoch: the ninth ends one."""
    expected = job(*SINGLE, *settings, "name=undisturbed")
    for step in steps:
        faulty = (*SINGLE, *settings, f"name=step{step}", fault([(step, signal.SIGINT)]))
        with contextlib.suppress(Stopped):
            job(*faulty)
        run = job(*faulty)
        assert torch.equal(weights(run), weights(expected))
        for ours, theirs in zip(rows(run), rows(expected), strict=True):
            for name in ("epoch", "step", "lr", "val/loss"):
                assert ours.get(name) == theirs.get(name)
            for name in TRAINED & theirs.keys():
                assert ours[name] == theirs[name]


@pytest.mark.full
def test_replicas_of_a_later_stage_stop_together(shell: Shell) -> None:
    """One of them waits for the other's share of an update until the pipeline is empty."""
    pipeline = ("parallel=pipeline", "parallel.plan.config=1-2", "parallel.plan.cuts=[2]")
    data = ("data.train_size=320", "data.delay_s=0.01", "hardware=cores", "parallel.grace_s=60")
    stopped = shell(*pipeline, *data, fault([(4, signal.SIGTERM)], parent=True))
    assert stopped.code == 128 + signal.SIGTERM
    assert "weights from here on differ" in stopped.err
    assert 4 < checkpoint(shell.runs()[0])["callbacks"]["RunCheckpoint"]["batches"] < 80


def test_of_an_epoch_that_was_stopped_twice_figures_are_of_all_its_batches(job: Job) -> None:
    expected = job(*SINGLE, "name=undisturbed")
    faulty = (*SINGLE, fault([(12, signal.SIGINT), (14, signal.SIGINT)]))
    for _ in range(2):
        with pytest.raises(Stopped):
            job(*faulty)
    run = job(*faulty)
    for name in TRAINED & rows(expected)[0].keys():
        assert [row[name] for row in rows(run)] == [row[name] for row in rows(expected)], name
    assert checkpoint(run)["epoch_sums"] == [{}]  # of the next epoch nothing
