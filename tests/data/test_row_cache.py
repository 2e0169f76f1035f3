"""The cache of sampled meshes: killed, filled, shared, corrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.lock import locked
from sparsepipe.data.manifest import scan_files
from sparsepipe.data.mesh_rows import SurfaceSampler
from sparsepipe.data.rows import CORRUPT, DONE, TODO, RowCache
from sparsepipe.data.sources import CacheSettings, OffTree
from sparsepipe.errors import DataError

POINTS = 1024

BUILD = """
import resource, sys
from pathlib import Path
from sparsepipe.data import row_workers
from sparsepipe.data.sources import CacheSettings, OffTree

if __name__ == "__main__":
    root, cache, workers, limit = sys.argv[1:]
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    row_workers._SECONDS_PER_WORKER = 0.01  # start them for a small tree, too
    settings = CacheSettings(directory=Path(cache), points=1024, workers=int(workers))
    OffTree(Path(root)).load("train", settings)
"""


@dataclass(frozen=True, slots=True)
class CountingSampler(SurfaceSampler):
    """A sampler that notes each file it reads, and may do something after some of them."""

    seen: list[str] = field(default_factory=list)
    then: Callable[[int], None] = lambda count: None

    def __call__(self, path: Path, digest: str):  # type: ignore[no-untyped-def]
        self.seen.append(path.name)
        self.then(len(self.seen))
        return SurfaceSampler.__call__(self, path, digest)


@pytest.fixture(autouse=True)
def eager_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes start for a small tree, too, where a test asks for them."""
    monkeypatch.setattr("sparsepipe.data.row_workers._SECONDS_PER_WORKER", 0.01)


def cache_of(root: Path, directory: Path, reader: SurfaceSampler | None = None) -> RowCache:
    names = OffTree(root).listing("train").names
    files = scan_files(root, names, cache_directory=directory)
    return RowCache(files, reader or SurfaceSampler(POINTS, 0), cache_directory=directory)


def build(cache: RowCache) -> RowCache:
    cache.build(workers=1, lock_wait_s=5)
    return cache


def start_build(root: Path, cache: Path, *, workers: int = 2, limit: int = 0):  # type: ignore[no-untyped-def]
    arguments = [str(root), str(cache), str(workers), str(limit)]
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, *arguments],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(cache: RowCache, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if (cache.state_S() != TODO).any():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    raise AssertionError("no row was marked within a minute")


def assert_session_ends(leader: int) -> None:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("workers outlived the process that started them")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_goes_on_where_it_was(
    make_tree: Callable[..., Path], tmp_path: Path, kill: signal.Signals
) -> None:
    root = make_tree(100, test_per_class=1)
    whole = build(cache_of(root, tmp_path / "whole"))
    cache = cache_of(root, tmp_path / "cut")
    process = start_build(root, tmp_path / "cut")
    wait_for_rows(cache, process)
    if kill == signal.SIGINT:
        os.killpg(process.pid, kill)  # as a terminal does
    else:
        process.kill()
    _, errors = process.communicate(timeout=30)
    assert_session_ends(process.pid)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in errors or kill == signal.SIGKILL
    done_S = cache.state_S() == DONE
    assert 0 < done_S.sum() < len(done_S)
    np.testing.assert_array_equal(cache.rows.array[done_S], whole.rows.array[done_S])
    np.testing.assert_array_equal(cache.meta_SK()[done_S], whole.meta_SK()[done_S])

    reader = CountingSampler(POINTS, 0)
    build(cache_of(root, tmp_path / "cut", reader))
    assert len(reader.seen) == (~done_S).sum()
    for name in ("rows.npy", "meta.npy", "state.npy"):
        rebuilt = (cache.directory / name).read_bytes()
        assert rebuilt == (whole.directory / name).read_bytes()


def test_a_finished_cache_is_not_built_again(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(3)
    first = CountingSampler(POINTS, 0)
    build(cache_of(root, tmp_path / "c", first))
    again = CountingSampler(POINTS, 0)
    build(cache_of(root, tmp_path / "c", again))
    assert (len(first.seen), len(again.seen)) == (9, 0)


def test_the_key_follows_content_and_settings(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(2)
    directory = cache_of(root, tmp_path / "c").directory
    assert cache_of(root, tmp_path / "c").directory == directory
    assert cache_of(root, tmp_path / "c", SurfaceSampler(POINTS, 1)).directory != directory
    assert cache_of(root, tmp_path / "c", SurfaceSampler(POINTS + 1, 0)).directory != directory
    moved = root.rename(tmp_path / "elsewhere")
    assert cache_of(moved, tmp_path / "c").directory == directory
    changed = moved / "box" / "train" / "box_0000.off"
    changed.write_text(changed.read_text().replace("OFF", "OFF # changed", 1))
    assert cache_of(moved, tmp_path / "c").directory != directory


def test_unchanged_files_are_not_read_again(
    make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(2)
    before = cache_of(root, tmp_path / "c").files
    read: list[str] = []
    monkeypatch.setattr(
        "sparsepipe.data.manifest.digest_file", lambda path: read.append(path.name) or "new"
    )
    assert cache_of(root, tmp_path / "c").files == before
    os.utime(root / "rod" / "train" / "rod_0001.off", ns=(1, 1))
    cache_of(root, tmp_path / "c")
    assert read == ["rod_0001.off"]


def test_workers_and_order_do_not_change_a_byte(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(20)
    alone = build(cache_of(root, tmp_path / "one"))
    together = cache_of(root, tmp_path / "two")
    together.build(workers=2, lock_wait_s=5)
    np.testing.assert_array_equal(alone.rows.array, together.rows.array)
    np.testing.assert_array_equal(alone.meta_SK(), together.meta_SK())


def test_two_builders_at_once_make_one_whole_cache(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(60, test_per_class=1)
    processes = [start_build(root, tmp_path / "c", workers=1) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    cache = cache_of(root, tmp_path / "c")
    assert (cache.state_S() == DONE).all()
    alone = build(cache_of(root, tmp_path / "alone"))
    np.testing.assert_array_equal(cache.rows.array, alone.rows.array)


def test_waiting_for_another_builder_has_a_limit(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    cache = cache_of(make_tree(2), tmp_path / "c")
    with (
        locked(cache.directory / "lock", wait_s=1),
        pytest.raises(DataError, match=rf"process {os.getpid()} .* longer than 0\.3 s") as caught,
    ):
        cache.build(workers=1, lock_wait_s=0.3)
    assert "data.lock_wait_s" in caught.value.remedy
    build(cache)


def corrupt_some(root: Path) -> None:
    (root / "box" / "train" / "box_0001.off").write_text("OFF\n8 12 0\n0 0 0\n")
    (root / "rod" / "train" / "rod_0002.off").write_text(
        "OFF\n3 1 0\n" + "nan 0 0\n" * 3 + "3 0 1 2\n"
    )


def test_corrupt_files_are_listed_and_left_out(
    make_tree: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = make_tree(4)
    corrupt_some(root)
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    points = OffTree(root).load("train", settings)
    assert len(points) == 10
    assert not {"box_0001", "rod_0002"} & set(points.names)
    by_class = [points.classes[label] for label in points.labels_S]
    assert by_class == [name.split("_")[0] for name in points.names]
    assert "2 of 12 train files are corrupt" in caplog.text
    listed = json.loads(next((tmp_path / "c").rglob("corrupt.json")).read_text())
    assert set(listed) == {"box/train/box_0001.off", "rod/train/rod_0002.off"}
    # The clouds that remain are those of their own files.
    clean = build(cache_of(root, tmp_path / "c"))
    assert (clean.state_S() == CORRUPT).sum() == 2
    for index, name in enumerate(points.names):
        path = root / name.split("_")[0] / "train" / f"{name}.off"
        low_3 = np.loadtxt(path, skiprows=2, max_rows=int(path.read_text().split()[1])).min(axis=0)
        np.testing.assert_allclose(points.cloud(index).min(axis=0), low_3, atol=0.4)
        np.testing.assert_allclose(points.frames.low_S3[index], low_3, atol=1e-5)


def test_strict_refuses_corrupt_files_and_names_them(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(4)
    corrupt_some(root)
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1, strict=True)
    for _ in range(2):  # also when the cache stands already
        with pytest.raises(DataError, match=r"(?s)box_0001\.off.*rod_0002\.off") as caught:
            OffTree(root).load("train", settings)
        assert "data.strict=false" in caught.value.remedy


def test_a_file_that_comes_back_is_no_longer_corrupt(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(3)
    path = root / "box" / "train" / "box_0001.off"
    text = path.read_text()
    path.write_text("OFF\n8 12 0\n0 0 0\n")
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    assert len(OffTree(root).load("train", settings)) == 8
    path.write_text(text)
    assert len(OffTree(root).load("train", settings)) == 9


def test_too_little_space_is_seen_beforehand(
    make_tree: Callable[..., Path], small_disk: Path
) -> None:
    reader = CountingSampler(16_384, 0)
    cache = cache_of(make_tree(20), small_disk, reader)
    with pytest.raises(DataError, match="MiB more, but") as caught:
        build(cache)
    assert "data.cache_dir" in caught.value.remedy
    assert not reader.seen


def test_a_disk_that_fills_up_loses_nothing(
    make_tree: Callable[..., Path],
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparsepipe.data.rows._SPARE_BYTES", 0)
    root = make_tree(12)
    filler = small_disk / "somebody-elses"

    def fill_up(count: int) -> None:
        if count == 8:
            with filler.open("wb", buffering=0) as file:
                try:
                    while file.write(b"x" * 4096):
                        pass
                except OSError:
                    return

    cache = cache_of(root, small_disk, CountingSampler(POINTS, 0, then=fill_up))
    with pytest.raises(DataError, match="no space left for the cache") as caught:
        build(cache)
    assert "run the same command again" in caught.value.remedy
    done = int((cache.state_S() == DONE).sum())
    assert done >= 7
    filler.unlink()
    rerun = CountingSampler(POINTS, 0)
    again = build(cache_of(root, small_disk, rerun))
    assert len(rerun.seen) == 36 - done
    whole = build(cache_of(root, tmp_path / "whole"))
    np.testing.assert_array_equal(again.rows.array, whole.rows.array)


def test_a_limit_on_file_size_is_explained(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = make_tree(20)
    process = start_build(root, tmp_path / "c", workers=1, limit=100_000)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "DataError: no space left for the cache" in errors
    assert "remedy: free some space" in errors
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    assert len(OffTree(root).load("train", settings)) == 60


def test_a_killed_worker_is_explained(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = make_tree(20)
    cache = cache_of(root, tmp_path / "c", Suicidal(POINTS, 0))
    with pytest.raises(DataError, match="killed or ran out of memory") as caught:
        cache.build(workers=2, lock_wait_s=5)
    assert "data.cache_workers" in caught.value.remedy
    assert (build(cache_of(root, tmp_path / "c")).state_S() == DONE).all()


@dataclass(frozen=True, slots=True)
class Suicidal(SurfaceSampler):
    """Ends its process as the kernel does when memory runs out."""

    def __call__(self, path: Path, digest: str):  # type: ignore[no-untyped-def]
        if path.name == "rod_0010.off":
            os.kill(os.getpid(), signal.SIGKILL)
        return SurfaceSampler.__call__(self, path, digest)
