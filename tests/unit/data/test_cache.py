"""The cache of prepared data: killed, shared, on full disks, with corrupt and unreadable files."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsepipe.data.files import digest_file, locked, scan_files
from sparsepipe.data.shape_rows import ShapeSampler
from sparsepipe.data.sources import CacheSettings, OffTree
from sparsepipe.errors import DataError
from tests.support.data_helpers import (
    POINTS,
    CountingSampler,
    Suicidal,
    assert_session_ends,
    rows_of,
    start,
    start_build,
    tiny,
    wait_for_build,
)

pytestmark = pytest.mark.usefixtures("eager_workers")

VICTIM = "box_0001.off"


@pytest.mark.full
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_begins_again(
    make_tree: Callable[..., Path], tmp_path: Path, kill: signal.Signals
) -> None:
    root = make_tree(100, test_per_class=1)
    whole = rows_of(root, tmp_path / "whole")
    process = start_build(root, tmp_path / "cut", slow=True)
    wait_for_build(tmp_path / "cut", process)
    if kill == signal.SIGINT:
        os.killpg(process.pid, kill)  # as a terminal does
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert_session_ends(process.pid)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in errors or kill == signal.SIGKILL
    assert not list((tmp_path / "cut").rglob("rows.npy"))
    again = rows_of(root, tmp_path / "cut")
    assert again.is_new
    assert {path.name for path in again.directory.iterdir()} == {
        *("rows.npy", "meta.npy", "corrupt.json", "lock")
    }
    for name in ("rows.npy", "meta.npy"):
        assert (again.directory / name).read_bytes() == (whole.directory / name).read_bytes()


@pytest.mark.full
def test_a_run_that_is_stopped_while_caching_says_how_to_go_on(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = tiny(make_tree(110, test_per_class=2), tmp_path)
    process = start(arguments, tmp_path, slow=True)
    wait_for_build(tmp_path / "data" / "cache", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    process = start(arguments, tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (Path(output.splitlines()[-1]) / "DONE.json").is_file()


def test_a_finished_cache_is_not_built_again(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(3)
    first, again = CountingSampler(POINTS, 0), CountingSampler(POINTS, 0)
    assert rows_of(root, tmp_path / "c", first).is_new
    assert not rows_of(root, tmp_path / "c", again).is_new
    assert (len(first.seen), len(again.seen)) == (9, 0)


def test_the_key_follows_content_and_settings(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(2)
    directory = rows_of(root, tmp_path / "c").directory
    others = (ShapeSampler(POINTS, 1), ShapeSampler(POINTS + 1, 0), ShapeSampler(POINTS, 0, True))
    for other in others:
        assert rows_of(root, tmp_path / "c", other).directory != directory
    moved = root.rename(tmp_path / "elsewhere")
    assert rows_of(moved, tmp_path / "c").directory == directory
    changed = moved / "box" / "train" / "box_0000.off"
    changed.write_text(changed.read_text().replace("OFF", "OFF # changed", 1))
    assert rows_of(moved, tmp_path / "c").directory != directory


def test_unchanged_files_are_not_digested_again(
    make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(2)
    names = OffTree(root).listing("train").names
    before = scan_files(root, names, cache_directory=tmp_path / "c")
    assert {file.digest for file in before} == {digest_file(file.path) for file in before}
    read: list[str] = []
    monkeypatch.setattr(
        "sparsepipe.data.files.digest_file", lambda path: read.append(path.name) or "new"
    )
    assert scan_files(root, names, cache_directory=tmp_path / "c") == before
    os.utime(root / "rod" / "train" / "rod_0001.off", ns=(1, 1))
    scan_files(root, names, cache_directory=tmp_path / "c")
    assert read == ["rod_0001.off"]


def test_workers_and_order_do_not_change_a_byte(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(20)
    alone = rows_of(root, tmp_path / "one")
    together = rows_of(root, tmp_path / "two", workers=2)
    np.testing.assert_array_equal(alone.rows.array, together.rows.array)
    np.testing.assert_array_equal(alone.meta_SK, together.meta_SK)


def test_waiting_for_another_builder_has_a_limit(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(2)
    directory = rows_of(root, tmp_path / "c").directory
    (directory / "rows.npy").unlink()
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, lock_wait_s=0.3)
    with (
        locked(directory / "lock", wait_s=60),
        pytest.raises(DataError, match=r"another process .* longer than 0\.3 s") as caught,
    ):
        OffTree(root).load("train", settings)
    assert "data.lock_wait_s" in caught.value.remedy
    assert rows_of(root, tmp_path / "c").is_new


def test_a_killed_worker_is_explained(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = make_tree(20)
    with pytest.raises(DataError, match="killed or ran out of memory") as caught:
        rows_of(root, tmp_path / "c", Suicidal(POINTS, 0), workers=2)
    assert "data.cache_workers" in caught.value.remedy
    assert 'if __name__ == "__main__":' in caught.value.remedy


def test_too_little_space_is_seen_beforehand(
    make_tree: Callable[..., Path], small_disk: Path
) -> None:
    reader = CountingSampler(16_384, 0)
    with pytest.raises(DataError, match="No space left on device") as caught:
        rows_of(make_tree(20), small_disk, reader)
    assert "data.cache_dir" in caught.value.remedy
    assert not reader.seen


def corrupt_some(root: Path) -> None:
    (root / "box" / "train" / VICTIM).write_text("OFF\n8 12 0\n0 0 0\n")
    (root / "rod" / "train" / "rod_0002.off").write_text(
        "OFF\n3 1 0\n" + "nan 0 0\n" * 3 + "3 0 1 2\n"
    )


def test_corrupt_files_are_listed_and_left_out(
    make_tree: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(4)
    corrupt_some(root)
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    for loud in (["WARNING"], []):
        caplog.clear()
        points = OffTree(root).load("train", settings)
        assert [record.levelname for record in caplog.records if record.levelno > 20] == loud
    assert len(points) == 10
    assert not {"box_0001", "rod_0002"} & set(points.names)
    by_class = [points.classes[label] for label in points.labels_S]
    assert by_class == [name.split("_")[0] for name in points.names]
    listed = json.loads(next((tmp_path / "c").rglob("corrupt.json")).read_text())
    assert set(listed) == {"box/train/box_0001.off", "rod/train/rod_0002.off"}
    # The clouds that remain are those of their own files.
    for index, name in enumerate(points.names):
        path = root / name.split("_")[0] / "train" / f"{name}.off"
        low_3 = np.loadtxt(path, skiprows=2, max_rows=int(path.read_text().split()[1])).min(axis=0)
        np.testing.assert_allclose(points.cloud(index).min(axis=0), low_3, atol=0.4)
        np.testing.assert_allclose(points.frames.low_S3[index], low_3, atol=1e-5)
    strict = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1, strict=True)
    with pytest.raises(DataError, match=r"(?s)box_0001\.off.*rod_0002\.off") as caught:
        OffTree(root).load("train", strict)
    assert "data.strict=false" in caught.value.remedy


@dataclass(frozen=True, slots=True)
class Failing(ShapeSampler):
    """A sampler whose system fails at one file."""

    error: type[Exception] = OSError

    def __call__(self, path: Path, digest: str) -> tuple[Any, Any]:
        if path.name == VICTIM:
            raise self.error(errno.EMFILE, "Too many open files")
        return ShapeSampler.__call__(self, path, digest)


@pytest.mark.parametrize("error", [OSError, ImportError, MemoryError])
def test_a_system_that_fails_does_not_make_a_file_corrupt(
    make_tree: Callable[..., Path], tmp_path: Path, error: type[Exception]
) -> None:
    root = make_tree(3)
    with pytest.raises((DataError, ImportError)):
        rows_of(root, tmp_path / "c", Failing(POINTS, 0, error=error))
    assert not rows_of(root, tmp_path / "c").faults


def test_a_disk_that_fails_while_scanning_is_explained(
    make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(3)

    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("sparsepipe.data.files.digest_file", fail)
        with pytest.raises(DataError, match="Input/output error"):
            rows_of(root, tmp_path / "c")
    assert not rows_of(root, tmp_path / "c").faults
