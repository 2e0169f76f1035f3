"""Ledgers that several processes make at a time have all rows."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparsepipe.errors import DataError
from sparsepipe.runs import ledger as ledger_lock
from sparsepipe.runs.ledger import LOCK, gather, ledger_locked, load_results

GATHERING = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from sparsepipe.runs.ledger import gather
print(len(gather("swept")))
"""

BY_TWO_USERS = """
import logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from sparsepipe.errors import DataError
from sparsepipe.runs.ledger import gather
from sparsepipe.runs.ledger import LOCK
gather("swept")  # makes the file, and imports what another user may not be able to read
os.chmod("swept/" + LOCK, int(sys.argv[1], 8))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    open("swept/" + LOCK, "w")
except PermissionError:
    print("another", flush=True)
for _ in sys.stdin:
    try:
        print(len(gather("swept")))
    except DataError as error:
        print(error.message)
"""
"""Of a file that nobody may write the same holds for its owner, unless that is root."""


def finish(place: Path, run_id: str) -> None:
    run = place / "swept" / run_id
    run.mkdir(parents=True)
    told = {"run_id": run_id, "name": "swept", "kind": "measured"}
    (run / "result.json").write_text(json.dumps(told))
    (run / "DONE.json").write_text(json.dumps({"time": 1.0}))


def test_who_waits_reads_what_has_been_finished_meanwhile(tmp_path: Path) -> None:
    """Else it would write the rows of before over those of who was quicker."""
    finish(tmp_path, "1")
    command = [sys.executable, "-u", "-c", GATHERING]
    with ledger_locked(tmp_path / "swept"):
        other = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert "another process makes the ledger in swept" in other.stdout.readline()
        finish(tmp_path, "2")
    assert other.communicate(timeout=120)[0] == "2\n"
    assert list(load_results(tmp_path / "swept" / "ledger.csv")["run_id"]) == ["1", "2"]


def test_whoever_holds_it_for_ever_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_lock, "_LIMIT_S", 0.1)
    finish(tmp_path, "1")
    with (tmp_path / "swept" / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"making the ledger in .*swept for longer than 0\.1 s"):
            gather(tmp_path / "swept")
    assert not (tmp_path / "swept" / "ledger.csv").exists()
    assert len(gather(tmp_path / "swept")) == 1


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """A process for which the file has these permissions, before it makes the ledger."""
    begun: list[subprocess.Popen[str]] = []

    def another(mode: str) -> subprocess.Popen[str]:
        finish(tmp_path, "1")
        for path in (tmp_path / "swept").rglob("*"):
            path.chmod(0o755)
        (tmp_path / "swept").chmod(0o777)
        tmp_path.chmod(0o755)
        command = [sys.executable, "-u", "-c", BY_TWO_USERS, mode]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=tmp_path, text=True, stdin=pipe, stdout=pipe)
        begun.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "another\n"
        return process

    yield another
    for process in begun:
        process.kill()
        process.communicate(timeout=60)


def test_a_file_that_none_may_read_keeps_no_ledger_from_being_written(
    another: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    other = another("0")
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("\n")
    other.stdin.flush()
    told = other.stdout.readline()
    assert told.startswith(f"swept/{LOCK} cannot be locked ([Errno 13] Permission denied")
    assert "remedy:" in told
    assert other.stdout.readline() == "1\n"
    _is_of_another(tmp_path / "swept")
    assert other.communicate(timeout=120)[0] == ""


def _is_of_another(place: Path) -> None:
    assert (place / LOCK).stat().st_uid == os.geteuid()
    for name in ("ledger.parquet", "ledger.csv"):
        assert (place / name).stat().st_uid == (os.geteuid() or 65534)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"), ledger_locked(tmp_path / "file"):
        pass


def test_where_no_runs_can_be_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no directory"):
        gather(tmp_path / "none", to=tmp_path / "to")
    assert not list(tmp_path.iterdir())
