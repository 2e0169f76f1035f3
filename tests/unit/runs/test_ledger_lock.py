"""Ledgers that several processes make at a time have all rows."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsepipe.errors import DataError
from sparsepipe.runs import ledger as ledger_lock
from sparsepipe.runs.ledger import LOCK, gather, load_results
from sparsepipe.utils.files import file_lock

GATHERING = """
from sparsepipe.runs.ledger import gather
print("begun")
print(len(gather("swept")))
"""


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
    with file_lock(tmp_path / "swept" / LOCK):
        other = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"
        time.sleep(0.5)
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
        with pytest.raises(DataError, match=r"writing the ledger in .*swept for 0\.1 s"):
            gather(tmp_path / "swept")
    assert not (tmp_path / "swept" / "ledger.csv").exists()
    assert len(gather(tmp_path / "swept")) == 1
