"""The cache of sampled meshes: killed, shared, rebuilt."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.files import locked
from sparsepipe.data.mesh_rows import SurfaceSampler
from sparsepipe.data.row_cache import DONE
from sparsepipe.errors import DataError
from tests.support.data_helpers import (
    POINTS,
    CountingSampler,
    Suicidal,
    assert_session_ends,
    build,
    cache_of,
    start_build,
    wait_for_rows,
)

pytestmark = pytest.mark.usefixtures("eager_workers")


@pytest.mark.full
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_build_goes_on_where_it_was(
    make_tree: Callable[..., Path], tmp_path: Path, kill: signal.Signals
) -> None:
    root = make_tree(100, test_per_class=1)
    whole = build(cache_of(root, tmp_path / "whole"))
    cache = cache_of(root, tmp_path / "cut")
    process = start_build(root, tmp_path / "cut", stands=True)
    wait_for_rows(cache, process)
    if kill == signal.SIGINT:
        os.killpg(process.pid, kill)  # as a terminal does
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
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
        "sparsepipe.data.files.digest_file", lambda path: read.append(path.name) or "new"
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
    together.build(workers=2, lock_wait_s=60)
    np.testing.assert_array_equal(alone.rows.array, together.rows.array)
    np.testing.assert_array_equal(alone.meta_SK(), together.meta_SK())


@pytest.mark.full
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
        locked(cache.directory / "lock", wait_s=60),
        pytest.raises(DataError, match=r"another process .* longer than 0\.3 s") as caught,
    ):
        cache.build(workers=1, lock_wait_s=0.3)
    assert "data.lock_wait_s" in caught.value.remedy
    build(cache)


@pytest.mark.parametrize(("quiet_s", "told"), [(60.0, 0), (0.0, 1)])
def test_a_short_wait_is_not_worth_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    quiet_s: float,
    told: int,
) -> None:
    monkeypatch.setattr("sparsepipe.data.files._QUIET_S", quiet_s)
    caplog.set_level("INFO")
    with (
        locked(tmp_path / "lock", wait_s=60),
        pytest.raises(DataError, match="longer than"),
        locked(tmp_path / "lock", wait_s=0.5),
    ):
        pass
    assert caplog.text.count("waiting for another process") == told


def test_a_killed_worker_is_explained(make_tree: Callable[..., Path], tmp_path: Path) -> None:
    root = make_tree(20)
    cache = cache_of(root, tmp_path / "c", Suicidal(POINTS, 0))
    with pytest.raises(DataError, match="killed or ran out of memory") as caught:
        cache.build(workers=2, lock_wait_s=60)
    assert "data.cache_workers" in caught.value.remedy
    assert 'if __name__ == "__main__":' in caught.value.remedy
    assert (build(cache_of(root, tmp_path / "c")).state_S() == DONE).all()
