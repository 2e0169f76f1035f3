"""Checkpoints that finished runs keep, what runs take on disk, and task=clean."""

from __future__ import annotations

import logging
import os
import pty
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparsepipe.config.schema import KeptCheckpoints
from sparsepipe.errors import CheckpointError, ConfigError, NoRunsError
from sparsepipe.runs.checkpoints import find_checkpoint
from sparsepipe.runs.disk import clean, size_bytes, size_text, superfluous
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.utils.files import read_json
from tests.support.command_line import fault

Job = Callable[..., Path]


def made(path: Path, *names: str, done: bool = True) -> RunDir:
    """A run's directory with checkpoints, each of 1 MB."""
    run = RunDir(path)
    run.checkpoints.mkdir(parents=True)
    run.config.touch()
    for name in names:
        (run.checkpoints / f"{name}.ckpt").write_bytes(bytes(1_000_000))
    (run.checkpoints / "fitted.json").touch()
    if done:
        run.done.touch()
    return run


def names(run: RunDir) -> list[str]:
    return sorted(path.stem for path in run.checkpoints.glob("*.ckpt"))


@pytest.mark.parametrize(
    ("keep", "there", "removed"),
    [
        ("both", ["best", "last"], []),
        ("best", ["best", "last"], ["last"]),
        ("best", ["last"], []),  # nothing was validated
        ("last", ["best", "last", "mine"], ["best", "mine"]),
        ("none", ["best", "last"], ["best", "last"]),
        ("none", [], []),
    ],
)
def test_what_is_not_kept(
    keep: KeptCheckpoints, there: list[str], removed: list[str], tmp_path: Path
) -> None:
    run = made(tmp_path / "run", *there)
    assert [path.stem for path in superfluous(run, keep)] == removed


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "last")
    os.link(run.last, run.best)
    assert size_bytes([run.last, run.best, tmp_path / "gone"]) == 1_000_000
    assert [size_text(size) for size in (400_000, 12_300_000_000)] == ["0.4 MB", "12.3 GB"]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    made(tmp_path / "first" / "1", "best", "last")
    made(tmp_path / "first" / "2", "last", done=False)
    made(tmp_path / "second" / "3", "last")
    return tmp_path


def cleaned(outputs: Path, **settings: object) -> str:
    return clean([], width=80, where=str(outputs), **settings)  # type: ignore[arg-type]


def test_nothing_is_removed_where_nobody_can_be_asked(
    outputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        with pytest.raises(
            ConfigError,
            match=r"a terminal nobody can be asked\s+remedy: set task.ask=false",
        ):
            cleaned(outputs)
    listed = capsys.readouterr().out
    assert re.search(r"first/1 +\| best.ckpt, last.ckpt \| 2.0 \|", listed)
    assert "first/2" not in listed, "which is not finished"
    assert "1 unfinished run keeps 1.0 MB of checkpoints, from which" in listed
    assert "together" in listed
    assert [names(RunDir(path)) for path in sorted(outputs.glob("*/*"))] == [
        ["best", "last"], ["last"], ["last"],
    ]  # fmt: skip


@contextmanager
def terminal(answer: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    with os.fdopen(theirs) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stream)
        yield
    os.close(ours)


def test_somebody_is_asked(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in ("\n", "no\n", "\x04"):
        with terminal(answer, monkeypatch):
            assert cleaned(outputs) == "nothing is removed"
    with terminal("y\n", monkeypatch):
        assert cleaned(outputs, keep="best") == "removed checkpoints of 1 run"
    assert names(RunDir(outputs / "first" / "1")) == ["best"]
    assert names(RunDir(outputs / "second" / "3")) == ["last"], "the only one it has"


def test_runs_of_one_experiment_and_none_that_others_work_on(outputs: Path) -> None:
    first, second = RunDir(outputs / "first" / "1"), RunDir(outputs / "second" / "3")
    with locked(first):
        text = cleaned(outputs, experiment="first", ask=False)
    assert text == "removed checkpoints of 0 runs; skipped 1, used by other processes"
    assert (names(first), names(second)) == (["best", "last"], ["last"])
    assert cleaned(outputs, experiment="first", ask=False) == "removed checkpoints of 1 run"
    assert (names(first), names(second)) == ([], ["last"])
    assert names(RunDir(outputs / "first" / "2")) == ["last"], "from which it goes on"
    assert "has a checkpoint to remove\n\n1 unf" in cleaned(outputs, experiment="first")
    with pytest.raises(NoRunsError, match="known here: first, second"):
        cleaned(outputs, experiment="frist")
    with pytest.raises(NoRunsError, match="not found"):
        cleaned(outputs / "nowhere")


def test_links_do_not_lead_out_of_the_directory(tmp_path: Path) -> None:
    apart = made(tmp_path / "apart" / "4", "last")
    own = made(tmp_path / "outputs" / "first" / "1")
    own.checkpoints.rename(tmp_path / "first")
    own.checkpoints.symlink_to(apart.checkpoints)
    (tmp_path / "outputs" / "second").symlink_to(apart.path.parent)
    (tmp_path / "linked").symlink_to(tmp_path / "outputs")
    text = cleaned(tmp_path / "linked", ask=False)
    assert text.endswith("behind links: 2")
    assert names(apart) == ["last"]
    assert cleaned(tmp_path / "outputs" / "second", ask=False) == "removed checkpoints of 1 run"


def test_a_run_that_is_to_keep_none_goes_on_until_it_has_finished(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    """Interrupted it has its checkpoint; finished it is what it would have been, without any."""
    caplog.set_level(logging.INFO)
    whole = job("trainer.max_epochs=2", "name=whole")
    assert "are best.ckpt, last.ckpt (trainer.checkpoints=both)" in caplog.text
    faulty = ("trainer.max_epochs=2", "trainer.checkpoints=none", fault([(5, signal.SIGTERM)]))
    with pytest.raises(Stopped):
        job(*faulty)
    run = RunDir(job(*faulty))
    assert "resuming at epoch" in caplog.text
    assert ", without checkpoints (trainer.checkpoints=none)" in caplog.text
    assert names(run) == []
    for name in ("test/loss", "best_monitored", "tested_checkpoint"):
        assert read_json(run.result)[name] == read_json(whole / "result.json")[name], name
    assert job(*faulty) == run.path, "and is finished"
    with pytest.raises(CheckpointError, match=r"trainer.checkpoints and task=clean"):
        job("task=evaluate", f"checkpoint={run.path}")


def test_the_checkpoint_that_is_kept_is_taken(tmp_path: Path) -> None:
    run = made(tmp_path / "run", "best")
    assert find_checkpoint(str(run.path)) == find_checkpoint(str(run.path), best=True) == run.best
    with pytest.raises(CheckpointError, match="no checkpoint at") as refused:
        find_checkpoint(str(run.last))
    assert str(run.best) in refused.value.remedy
    named = made(tmp_path / "outputs" / "first" / "0a1b", "best")
    with pytest.raises(CheckpointError) as refused:
        find_checkpoint("0a1b", outputs=str(tmp_path / "outputs"))
    assert refused.value.remedy.endswith(f", such as {named.path}")
