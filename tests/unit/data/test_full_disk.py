"""A cache on a disk that is or becomes full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.row_cache import DONE
from sparsepipe.data.sources import CacheSettings, OffTree
from sparsepipe.errors import DataError
from tests.support.data_helpers import (
    POINTS,
    CountingSampler,
    build,
    cache_of,
    start_build,
)


def test_too_little_space_is_seen_beforehand(
    make_tree: Callable[..., Path], small_disk: Path
) -> None:
    reader = CountingSampler(16_384, 0)
    cache = cache_of(make_tree(20), small_disk, reader)
    with pytest.raises(DataError, match="MiB more, but") as caught:
        build(cache)
    assert "data.cache_dir" in caught.value.remedy
    assert not reader.seen


def test_a_disk_that_fills_up_keeps_finished_rows(
    make_tree: Callable[..., Path],
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sparsepipe.data.row_cache._SPARE_BYTES", 0)
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
    with pytest.raises(DataError, match="no space left in") as caught:
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
    assert "DataError: no space left in" in errors
    assert "remedy: free some space" in errors
    settings = CacheSettings(directory=tmp_path / "c", points=POINTS, workers=1)
    assert len(OffTree(root).load("train", settings)) == 60
