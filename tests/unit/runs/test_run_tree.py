"""A tree of runs that changes while it is read, as one below which a sweep is under way."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.runs import ledger
from sparsepipe.runs.ledger import read_tree, run_directories


def leave(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("{}\n")
    (path / "result.json").write_text(json.dumps({"run_id": path.name}))
    (path / "DONE.json").write_text(json.dumps({"time": 1e9}))
    return path


def test_a_directory_may_go_before_it_is_looked_into(tmp_path: Path) -> None:
    first = leave(tmp_path, "a/1")
    leave(tmp_path, "b/2")
    found = run_directories(tmp_path)
    assert next(found) == first
    shutil.rmtree(tmp_path / "b")
    assert list(found) == []


def test_a_run_may_be_started_anew_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, anew = leave(tmp_path, "a/1"), leave(tmp_path, "a/2")
    read = ledger.read_mapping

    def while_others_work(path: Path, **needed: Any) -> Any:
        if anew in path.parents and anew.exists():
            shutil.rmtree(anew)
        return read(path, **needed)

    monkeypatch.setattr(ledger, "read_mapping", while_others_work)
    with caplog.at_level(logging.WARNING):
        tree = read_tree(tmp_path)
    assert list(tree.rows) == [kept]
    assert (tree.unfinished, tree.broken) == ([anew], [])
    assert not caplog.messages
