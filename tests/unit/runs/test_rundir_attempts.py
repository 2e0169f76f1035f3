"""Runs that are started anew, and what trackers elsewhere call them: never twice the same."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sparsepipe.runs.rundir import RunDir

FORCED = {"force": True, "seed": 0}
AGAIN = {"force": False, "seed": 0}


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


def test_what_an_older_version_has_noted_counts(directory: RunDir) -> None:
    (directory.path / ".attempt").write_text("3")
    assert directory.attempt == 3
    directory.open(AGAIN)
    shutil.rmtree(directory.path)
    assert directory.attempt == 3


def test_other_runs_are_left_alone(directory: RunDir) -> None:
    """Another that is started anew is no business of this one."""
    others = directory.path.with_name(f".ba9876543210.{os.getpid()}.1")
    others.mkdir()
    directory.open(FORCED)
    assert others.is_dir()
