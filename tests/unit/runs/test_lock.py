"""Directories for processes that talk: none is left for good, not even by those that are killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparsepipe.runs.lock import scratch

OTHER = """
import time
from sparsepipe.runs.lock import scratch

with scratch() as place:
    (place / "report").touch()
    print(place, flush=True)
    time.sleep(300)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where such directories are."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_there_for_a_block(place: Path) -> None:
    with scratch() as one, scratch() as other:
        (one / "report").touch()
        assert one != other
        assert one.is_dir()
        assert {one.parent, other.parent} == {place}
    assert not list(place.iterdir())


def test_what_a_killed_process_has_left_is_removed(place: Path) -> None:
    """And what is in use, or nobody's, is not."""
    (place / "sparsepipe-of-mine").mkdir()
    other = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True)
    with other:
        try:
            assert other.stdout is not None
            left = Path(other.stdout.readline().strip())
            with scratch():
                assert (left / "report").exists(), "it is in use"
        finally:
            other.kill()
    assert (left / "report").exists(), "a killed process removes nothing"
    with scratch():
        assert not left.exists()
    assert [path.name for path in place.iterdir()] == ["sparsepipe-of-mine"]
