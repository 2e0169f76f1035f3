"""Builds of the cache that a full disk or a signal ends, and reruns that go on."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.errors import DataError
from tests.support.data_commands import start, tiny


def assert_full(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == DataError.exit_code, errors
    said, _, advice = errors.partition("remedy:")
    assert "no space left in" in said
    assert "set data.cache_dir to a larger disk" in advice
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_limit_on_the_size_of_files_ends_the_run(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    assert_full(start(tiny(make_tree(20), tmp_path), tmp_path, most_bytes=100_000))


@pytest.mark.full
def test_a_disk_that_fills_up_ends_the_run_until_there_is_space(
    make_tree: Callable[..., Path], small_disk: Path, tmp_path: Path
) -> None:
    arguments = [*tiny(make_tree(110, test_per_class=2), tmp_path), f"data.cache_dir={small_disk}"]
    process = start(arguments, tmp_path, stands_in=small_disk)
    wait_for_marks(small_disk, process)
    filler = small_disk / "somebody-elses"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    (tmp_path / "go").touch()
    assert_full(process)
    filler.unlink()
    assert 0 < marked_rows(small_disk) < 330
    process = start(arguments, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert marked_rows(small_disk) == 336


def wait_for_marks(cache: Path, process: subprocess.Popen[str], *, beyond: int = 0) -> None:
    deadline_s = time.monotonic() + 120
    while marked_rows(cache) <= beyond:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s, "no row was marked within two minutes"
        time.sleep(0.005)


def marked_rows(cache: Path) -> int:
    states = cache.glob("points/*/state.npy")
    return sum(int((np.load(state) != 0).sum()) for state in states)


@pytest.mark.full
def test_a_run_killed_and_interrupted_while_caching_goes_on(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = tiny(make_tree(110, test_per_class=2), tmp_path)
    cache, marked = tmp_path / "data" / "cache", 0
    for ending in (signal.SIGKILL, signal.SIGINT):
        process = start(arguments, tmp_path, stands_in=cache)
        wait_for_marks(cache, process, beyond=marked)
        process.send_signal(ending)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (130 if ending == signal.SIGINT else -ending), errors
        assert marked < marked_rows(cache) < 330
        marked = marked_rows(cache)
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    process = start(arguments, tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (Path(output.splitlines()[-1]) / "DONE.json").is_file()
    assert marked_rows(cache) == 336
