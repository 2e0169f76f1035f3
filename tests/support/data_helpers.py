"""What several tests of the data room share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsepipe.data import Augment, OffTree
from sparsepipe.data.dataset import ShapeDataset
from sparsepipe.data.files import scan_files
from sparsepipe.data.mesh_rows import SurfaceSampler
from sparsepipe.data.row_cache import TODO, RowCache
from sparsepipe.errors import DataError

STRONG = Augment(
    scale=(0.7, 1.1), shift=0.1, jitter=0.02, rotate_deg=180, flip=0.5, dropout=0.3, outside="drop"
)


Shape = tuple[bytes, int]


def shapes_of(batches: Iterator[dict[str, Any]] | Any) -> dict[int, Shape]:
    """Voxels and label of each shape, by index."""
    shapes: dict[int, Shape] = {}
    for batch in batches:
        coords_N4 = batch["input"].coords
        for place, (index, label) in enumerate(
            zip(batch["index"].tolist(), batch["label"].tolist(), strict=True)
        ):
            own_M3 = coords_N4[coords_N4[:, 0] == place][:, 1:]
            assert len(own_M3)
            shapes[index] = (own_M3.numpy().tobytes(), label)
    return shapes


class Fatal(ShapeDataset):
    """Ends its process as the kernel does when memory runs out."""

    def __getitem__(self, access: tuple[int, int]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(access)


class Unreadable(ShapeDataset):
    """Fails as a lost disk would."""

    def __getitem__(self, access: tuple[int, int]) -> dict[str, Any]:
        raise DataError("the disk is gone", remedy="bring it back")


POINTS = 1024


STANDING = """
import os, sys, time
from pathlib import Path
import numpy as np
from sparsepipe.data import mesh_rows

def marked():
    states = Path(os.environ["STANDS_IN"]).glob("points/*/state.npy")
    return sum(int((np.load(state) != 0).sum()) for state in states)

stands = "STANDS_IN" in os.environ
begun_with = marked() if stands else 0
stands_until_s = time.monotonic() + 300  # should the test end before it ends this process

def read_slowly(path, read=mesh_rows.read_off):
    # However fast the machine, and however late the build is ended, it is in its middle.
    time.sleep(0.01)
    while stands and marked() > begun_with + 20 and time.monotonic() < stands_until_s:
        if Path(os.environ["GOES_ON_WITH"]).exists():
            break
        time.sleep(0.05)
    return read(path)

mesh_rows.read_off = read_slowly
"""

BUILD = (
    STANDING
    + """
import resource
from sparsepipe.data import row_cache
from sparsepipe.data.sources import CacheSettings, OffTree

if __name__ == "__main__":
    root, cache, workers, limit = sys.argv[1:]
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    row_cache._SECONDS_PER_WORKER = 0.01  # start them for a small tree, too
    settings = CacheSettings(directory=Path(cache), points=1024, workers=int(workers))
    OffTree(Path(root)).load("train", settings)
"""
)


@dataclass(frozen=True, slots=True)
class CountingSampler(SurfaceSampler):
    """A sampler that notes each file it reads, and may do something after some of them."""

    seen: list[str] = field(default_factory=list)
    then: Callable[[int], None] = lambda count: None

    def __call__(self, path: Path, digest: str):  # type: ignore[no-untyped-def]
        self.seen.append(path.name)
        self.then(len(self.seen))
        return SurfaceSampler.__call__(self, path, digest)


@dataclass(frozen=True, slots=True)
class Suicidal(SurfaceSampler):
    """Ends its process as the kernel does when memory runs out."""

    def __call__(self, path: Path, digest: str):  # type: ignore[no-untyped-def]
        if path.name == "rod_0010.off":
            os.kill(os.getpid(), signal.SIGKILL)
        return SurfaceSampler.__call__(self, path, digest)


def cache_of(root: Path, directory: Path, reader: SurfaceSampler | None = None) -> RowCache:
    names = OffTree(root).listing("train").names
    files = scan_files(root, names, cache_directory=directory)
    return RowCache(files, reader or SurfaceSampler(POINTS, 0), cache_directory=directory)


def build(cache: RowCache) -> RowCache:
    cache.build(workers=1, lock_wait_s=60)
    return cache


def standing(cache: Path, goes_on_with: Path | None = None) -> dict[str, str]:
    """An environment in which a build stands still in its middle, until a file is, or minutes."""
    never = cache / "never"
    return {**os.environ, "STANDS_IN": str(cache), "GOES_ON_WITH": str(goes_on_with or never)}


def start_build(  # type: ignore[no-untyped-def]
    root: Path, cache: Path, *, workers: int = 2, limit: int = 0, stands: bool = False
):
    arguments = [str(root), str(cache), str(workers), str(limit)]
    script = cache.with_name(f"build-{cache.name}.py")
    script.write_text(BUILD)  # a file, so that workers import it too, and stand still
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=standing(cache) if stands else None,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_rows(cache: RowCache, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        if (cache.state_S() != TODO).any():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    raise AssertionError("no row was marked within two minutes")


def assert_session_ends(leader: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("workers outlived the process that started them")
