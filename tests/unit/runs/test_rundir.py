"""Runs that are started anew, and what trackers elsewhere call them: never twice the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import pytorch_lightning as pl
import torch

from sparsepipe.errors import CheckpointError, ConfigError, OutputError
from sparsepipe.runs.rundir import RunDir, file_fingerprint
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, composed, rows

AGAIN = composed("experiment=tiny")
FORCED = AGAIN.replace(force=True)


@pytest.fixture
def directory(tmp_path: Path) -> RunDir:
    """Of a run that has begun."""
    made = RunDir(tmp_path / "tiny" / "0123456789ab")
    made.open(AGAIN)
    (made.path / "metrics.csv").write_text("epoch\n0\n")
    return made


def test_an_attempt_that_left_nothing_counts(directory: RunDir) -> None:
    assert directory.attempt == 0
    directory.open(FORCED)
    assert directory.attempt == 1
    directory.remove_if_unused()
    assert not directory.path.exists()
    directory.open(AGAIN)
    assert directory.attempt == 1, "not the first one's"
    directory.open(FORCED)
    assert directory.attempt == 2


def test_an_attempt_counts_where_it_is_killed_as_it_begins(
    directory: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(path: Path) -> None:
        raise Killed

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Killed):
        directory.open(FORCED)
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert not directory.path.exists()
    directory.open(AGAIN)
    assert directory.attempt == 1
    found = {path.name for path in directory.path.parent.iterdir()}
    assert found == {directory.run_id, f".{directory.run_id}.attempt"}, "and nothing is left aside"


def test_what_was_logged_to_trackers_stays(directory: RunDir) -> None:
    for count in range(1, 3):
        (directory.path / "wandb" / "offline-run").mkdir(parents=True)
        (directory.path / "wandb" / "offline-run" / "rows.wandb").write_text(str(count))
        directory.open(FORCED)
        assert not (directory.path / "wandb").exists()
        kept = sorted((directory.path / "wandb-earlier").glob("wandb*/offline-run/rows.wandb"))
        assert [file.read_text() for file in kept] == ["1", "2"][:count]
    assert not list(directory.path.parent.glob(f".{directory.run_id}.[0-9]*.[0-9]*"))


def test_other_runs_are_left_alone(directory: RunDir) -> None:
    """Another that is started anew is no business of this one."""
    others = directory.path.with_name(f".ba9876543210.{os.getpid()}.1")
    others.mkdir()
    directory.open(FORCED)
    assert others.is_dir()


Job = Callable[..., Path]


def test_what_a_run_leaves(job: Job, tmp_path: Path) -> None:
    run = job("seed=3")
    assert run.parent == tmp_path / "outputs" / "tiny"
    assert {path.name for path in run.iterdir()} == {
        *(".starts", "DONE.json", "checkpoints", "config.yaml", "confusion.csv", "confusion.png"),
        *("learning_curves.png", "metrics.csv", "per_class_accuracy.png", "result.json"),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"outputs"}
    assert [row["epoch"] for row in rows(run)] == ["0", "1"]
    result = read_json(run / "result.json")
    assert [result[key] for key in ("kind", "seed", "trainer.max_epochs")] == ["measured", 3, 2]
    assert result["test/accuracy"] == pytest.approx(float(rows(run)[-1]["test/accuracy"]))
    for name in ("epoch_time_s", "train_shapes_per_s", "peak_memory_bytes", "torch"):
        assert result[name]
    assert not any(isinstance(value, dict) and value for value in result.values())


class Removal(pl.Callback):
    """Removes the directory of all runs once, in the second epoch."""

    done: ClassVar[bool] = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1 and not Removal.done:
            Removal.done = True
            shutil.rmtree("outputs")


def test_a_run_whose_directory_is_removed_does_not_finish(job: Job) -> None:
    words = ("trainer.max_epochs=3", f"callbacks={{x: {{_target_: {__name__}.Removal}}}}")
    with pytest.raises(OutputError, match="was removed or moved while"):
        job(*words)
    assert not [*Path("outputs").glob("*/*/DONE.json")]
    run = RunDir(job(*words))
    assert (len(rows(run.path)), run.config.exists(), len(run.starts)) == (3, True, 1)
    run.config.unlink()
    with pytest.raises(OutputError, match="was removed or moved while"):
        run.finish({})


def test_finished_run_is_skipped_and_force_starts_anew(job: Job) -> None:
    run = job()
    written = (run / "metrics.csv").stat().st_mtime_ns
    assert job() == run
    assert job("data.num_workers=1", "task.gallery=3") == run
    assert (run / "metrics.csv").stat().st_mtime_ns == written
    (run / "stray").touch()
    assert job("force=true") == run
    assert (run / "metrics.csv").stat().st_mtime_ns != written
    assert not (run / "stray").exists()
    assert RunDir(run).attempt == 1, "trackers elsewhere must not take it for the first"
    assert job("seed=1") != run


def test_data_without_a_fingerprint_are_known_by_settings_and_root(job: Job) -> None:
    settings = ("data._target_=tests.support.tinyhouse.AnonymousData", "trainer.max_epochs=1")
    run = job(*settings, "data.root=here")
    assert job(*settings, "data.root=here", "data.num_workers=1") == run
    assert job(*settings, "data.root=there") != run
    assert job(*settings, "data.root=here", "data.train_size=36") != run


def test_checkpoint_of_another_model(job: Job) -> None:
    run = job()
    with pytest.raises(CheckpointError) as error:
        job("task=evaluate", "model.width=9", "task.allow=[model]", f"checkpoint={run}")
    assert "layers.0.weight is (8, 8) in the file, (9, 8) in the model" in error.value.message
    assert str(run / "config.yaml") in error.value.remedy
    assert error.value.exit_code == 5
    with pytest.raises(CheckpointError, match=r"layers\.1\.weight"):
        job("model.norm=true", f"checkpoint={run}")


def test_missing_and_broken_checkpoints(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        job("task=evaluate")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        job("task=evaluate", "checkpoint=nowhere")
    (tmp_path / "broken.ckpt").write_bytes(b"PK not a checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read"):
        job("task=evaluate", "checkpoint=broken.ckpt")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="has no 'state_dict'"):
        job("task=evaluate", "checkpoint=other.ckpt")


def test_training_from_a_checkpoint_starts_with_its_weights(job: Job) -> None:
    first = job()
    frozen = ("optim.optimizer.lr=0", f"checkpoint={first}")
    second = job(*frozen)
    for name, value in checkpoint(first)["state_dict"].items():
        assert torch.equal(checkpoint(second)["state_dict"][name], value), name
    told = [read_json(run / "result.json").get("first_weights") for run in (first, second)]
    assert told == [None, file_fingerprint(first / "checkpoints" / "last.ckpt")]


def test_best_checkpoint(job: Job) -> None:
    run = job("trainer.max_epochs=4", "optim.optimizer.lr=0.5", "task.monitor=val/loss",
              "task.mode=min")  # fmt: skip
    losses = [float(row["val/loss"]) for row in rows(run)]
    best = checkpoint(run, "best")["callbacks"]["RunCheckpoint"]
    assert best["best"] == pytest.approx(min(losses))
    assert best["epoch"] == losses.index(min(losses)) + 1


def test_two_processes_on_one_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsepipe.launch import job as module

    def inner(directory: RunDir, *_: object) -> None:
        with pytest.raises(ConfigError, match="another process is working on"):
            job()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "execute", inner)
    with pytest.raises(KeyboardInterrupt):
        job()


@pytest.mark.full
def test_a_sweep_is_recorded_where_its_runs_are(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(shell.cwd / "home"))
    swept = shell.sweep("paths.outputs=~/runs", "trainer.max_epochs=soon")
    assert "'trainer.max_epochs' must be" in swept.err, "a refused job does: Hydra comes first"
    assert len(list(shell.cwd.glob("home/runs/tiny/sweeps/*/multirun.yaml"))) == 1
    assert {path.name for path in shell.cwd.iterdir()} == {"home"}
