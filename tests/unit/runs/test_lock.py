"""Temporary directories: what killed processes leave in them, the next one removes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sparsepipe.runs.lock import scratch
from tests.support.command_line import wait_for
from tests.support.paths import environment

SHARED = Path("/dev/shm")
LOADS = """
import os, sys, time, multiprocessing
from pathlib import Path
from sparsepipe.runs.lock import keep_temporary_files_apart

def work(barrier, place):
    barrier.acquire()

if __name__ == "__main__":
    keep_temporary_files_apart()
    context = multiprocessing.get_context(sys.argv[1])
    held = [context.Semaphore(0), context.Queue()]
    process = context.Process(target=work, args=(held[0], "."), daemon=True)
    process.start()
    Path("ready").touch()
    while Path("stay").exists():
        time.sleep(0.01)
"""


def names_of(prefix: str, place: Path) -> set[str]:
    return {path.name for path in place.glob(f"{prefix}*")}


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.skipif(not SHARED.is_dir(), reason="semaphores are no files here")
def test_semaphores_and_sockets_of_a_dead_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """With everything it had started, as an out-of-memory killer or a batch system does it."""
    temporary = Path(tempfile.mkdtemp(prefix="sp"))  # short, since names of sockets must be
    stranger, lock = temporary / "pymp-stranger", SHARED / f"sem.mp-stranger-{os.getpid()}"
    stranger.mkdir()
    lock.touch()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    (tmp_path / "script.py").write_text(LOADS)
    (tmp_path / "stay").touch()
    process = subprocess.Popen(
        [sys.executable, "script.py", "forkserver"],
        cwd=tmp_path,
        env=environment(TMPDIR=str(temporary)),
        start_new_session=True,
    )
    try:
        wait_for((tmp_path / "ready").exists)
        (ours,) = temporary.glob("sparsepipe-*")
        assert list(ours.glob("listener-*")), "where the fork server listens"
        semaphores = names_of(f"sem.mp-{ours.name}", SHARED)
        assert semaphores
        assert not names_of("pymp-", temporary) - {stranger.name}
        with scratch():
            assert names_of(f"sem.mp-{ours.name}", SHARED) == semaphores, "they are in use"
        if killed:
            os.killpg(process.pid, signal.SIGKILL)
        (tmp_path / "stay").unlink()
        process.wait()
        if killed:
            assert ours.exists()
        with scratch() as next_start:
            assert names_of("", temporary) == {stranger.name, next_start.name}
        assert not names_of(f"sem.mp-{ours.name}", SHARED)
        assert lock.exists()
    finally:
        lock.unlink()
        shutil.rmtree(temporary)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
