"""Files that cannot be read just now are not taken for corrupt."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsepipe.data import OffTree
from sparsepipe.data.files import ShapeFile, digest_file
from sparsepipe.data.mesh_rows import SurfaceSampler
from sparsepipe.data.row_cache import DONE, _chunks, read_rows
from sparsepipe.errors import DataError
from tests.support.data_helpers import POINTS, CountingSampler, build, cache_of

VICTIM = "box_0001.off"


@dataclass(frozen=True, slots=True)
class Failing(SurfaceSampler):
    """A sampler whose system fails at one file."""

    error: type[Exception] = OSError

    def __call__(self, path: Path, digest: str) -> tuple[Any, Any]:
        if path.name == VICTIM:
            raise self.error(errno.EMFILE, "Too many open files")
        return SurfaceSampler.__call__(self, path, digest)


@dataclass(frozen=True, slots=True)
class Sleepy(Failing):
    """Fails at one file, and takes minutes for the others."""

    def __call__(self, path: Path, digest: str) -> tuple[Any, Any]:
        if path.name != VICTIM:
            time.sleep(120)
        return Failing.__call__(self, path, digest)


def test_a_failing_disk_while_scanning_is_forgotten(
    make_tree: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_tree(3)

    def fail(path: Path) -> str:
        if path.name == VICTIM:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return digest_file(path)

    with monkeypatch.context() as patch:
        patch.setattr("sparsepipe.data.files.digest_file", fail)
        with pytest.raises(DataError, match=rf"{VICTIM} cannot be read: Input") as caught:
            cache_of(root, tmp_path / "c")
    assert "what is done is kept" in caught.value.remedy
    cache = cache_of(root, tmp_path / "c")
    assert {file.digest for file in cache.files} == {digest_file(f.path) for f in cache.files}


@pytest.mark.parametrize("level", ["tree", "train"])
def test_a_root_that_may_not_be_listed_is_explained(
    make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    source, iterdir = OffTree(make_tree(1)), Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == level:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match="Permission denied") as caught:
        source.listing("train")
    assert "set data.root" in caught.value.remedy


def test_a_manifest_with_reasons_for_digests_is_not_trusted(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(3)
    before = cache_of(root, tmp_path / "c").files
    manifest = next((tmp_path / "c" / "manifests").iterdir())
    entries = json.loads(manifest.read_text())
    for entry in entries.values():
        entry[2] = "unreadable: Input/output error"
    for text in (json.dumps(entries), "[]", "{"):
        manifest.write_text(text)
        assert cache_of(root, tmp_path / "c").files == before


@pytest.mark.parametrize("error", [OSError, ImportError, MemoryError])
def test_a_failing_system_while_sampling_leaves_the_file_to_do(
    make_tree: Callable[..., Path], tmp_path: Path, error: type[Exception]
) -> None:
    root = make_tree(3)
    with pytest.raises((DataError, ImportError)):
        build(cache_of(root, tmp_path / "c", Failing(POINTS, 0, error)))
    reader = CountingSampler(POINTS, 0)
    again = build(cache_of(root, tmp_path / "c", reader))
    assert (again.state_S() == DONE).all()
    assert VICTIM in reader.seen
    assert len(reader.seen) < 9  # what was done before is kept


def test_a_file_that_vanishes_while_caching_is_not_corrupt(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    root = make_tree(3)
    cache = cache_of(root, tmp_path / "c")
    path = root / "box" / "train" / VICTIM
    text = path.read_text()
    path.unlink()
    with pytest.raises(DataError, match="does not exist"):
        build(cache)
    path.write_text(text)
    assert (build(cache).state_S() == DONE).all()


@pytest.mark.full
@pytest.mark.usefixtures("eager_workers")
def test_a_failure_does_not_wait_for_the_other_workers(
    make_tree: Callable[..., Path], tmp_path: Path
) -> None:
    cache = cache_of(make_tree(20), tmp_path / "c", Sleepy(POINTS, 0))
    files = sorted(cache.files, key=lambda file: file.path.name != VICTIM)
    start_s = time.monotonic()
    with pytest.raises(DataError, match="Too many open files"):
        list(read_rows(cache.reader, files, range(len(files)), workers=2))
    assert time.monotonic() - start_s < 60


def test_chunks_hold_eight_files_or_a_mebibyte() -> None:
    def sizes(file_bytes: int) -> list[int]:
        files = [ShapeFile(str(n), Path(str(n)), file_bytes, "") for n in range(20)]
        chunks = list(_chunks(files, np.arange(20).tolist()))
        assert [index for chunk in chunks for index, _ in chunk] == list(range(20))
        return [len(chunk) for chunk in chunks]

    assert sizes(1000) == [8, 8, 4]
    assert sizes(600_000) == [2] * 10
    assert sizes(10_000_000) == [1] * 20
