"""What several tests of data share, and the command line on small trees of meshes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsepipe.data import Augment, OffTree
from sparsepipe.data.cache import CachedRows, CacheSettings, RowReader, cached_rows
from sparsepipe.data.dataset import ShapeDataset
from sparsepipe.data.files import scan_files
from sparsepipe.data.shape_rows import ShapeSampler
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


class Unreadable(ShapeDataset):
    """Fails as a lost disk would."""

    def __getitem__(self, access: object) -> dict[str, Any]:
        raise DataError("the disk is gone", remedy="bring it back")


POINTS = 1024


SLOW = """
import time
from sparsepipe.data import formats
from sparsepipe.data.formats import READERS

def read_slowly(path, read=READERS[".off"]):
    time.sleep(0.05)
    return read(path)

READERS[".off"] = read_slowly
"""

BUILD = """
import sys
from pathlib import Path
from sparsepipe.data import cache
from sparsepipe.data.sources import CacheSettings, OffTree

if __name__ == "__main__":
    root, directory, workers = sys.argv[1:]
    cache._SECONDS_PER_WORKER = 0.01  # start them for a small tree, too
    settings = CacheSettings(directory=Path(directory), points=1024, workers=int(workers))
    OffTree(Path(root)).load("train", settings)
"""


@dataclass(frozen=True, slots=True)
class CountingSampler(ShapeSampler):
    """A sampler that notes each file it reads."""

    seen: list[str] = field(default_factory=list)

    def __call__(self, path: Path, digest: str):  # type: ignore[no-untyped-def]
        self.seen.append(path.name)
        return ShapeSampler.__call__(self, path, digest)


@dataclass(frozen=True, slots=True)
class Suicidal(ShapeSampler):
    """Ends its process as the kernel does when memory runs out."""

    def __call__(self, path: Path, digest: str):  # type: ignore[no-untyped-def]
        if path.name == "rod_0010.off":
            os.kill(os.getpid(), signal.SIGKILL)
        return ShapeSampler.__call__(self, path, digest)


def rows_of(
    root: Path, directory: Path, reader: RowReader | None = None, *, workers: int = 1
) -> CachedRows:
    """The cached rows of a tree's training meshes."""
    names = OffTree(root).listing("train").names
    files = scan_files(root, names, cache_directory=directory)
    settings = CacheSettings(directory=directory, points=POINTS, workers=workers)
    return cached_rows(files, reader or ShapeSampler(POINTS, 0), settings)


def start_build(  # type: ignore[no-untyped-def]
    root: Path, cache: Path, *, workers: int = 2, slow: bool = False
):
    """A process that builds the cache of a tree's training meshes."""
    arguments = [str(root), str(cache), str(workers)]
    script = cache.with_name(f"build-{cache.name}.py")
    script.write_text(SLOW * slow + BUILD)  # a file, so that workers import it too
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_build(cache: Path, process: subprocess.Popen[str]) -> None:
    """Waits until a build has begun to write its rows."""
    deadline_s = time.monotonic() + 120
    while not any(cache.glob("points/*/.rows.npy.*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s, "no build has begun within two minutes"
        time.sleep(0.005)


def assert_session_ends(leader: int) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("workers outlived the process that started them")


SLOWLY = (
    SLOW
    + """
from sparsepipe.cli import main

if __name__ == "__main__":
    main()
"""
)


def tiny(root: Path, place: Path) -> list[str]:
    """A run that would take seconds if the data were good."""
    return [
        "data=modelnet10",
        f"data.root={root}",
        f"paths.data={place / 'data'}",
        f"paths.outputs={place / 'outputs'}",
        "data.cached_points=512",
        "data.num_points=256",
        "data.resolution=8",
        "data.batch_size=4",
        "data.cache_workers=1",
        "model=sparse_vgg11_bn",
        "model.width=0.05",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=2",
        "trainer.limit_test_batches=1",
    ]


def start(
    arguments: list[str],
    cwd: Path,
    *,
    slow: bool = False,
) -> subprocess.Popen[str]:
    """The command line, perhaps reading meshes slowly."""
    how = ["-c", SLOWLY] if slow else ["-m", "sparsepipe"]
    return subprocess.Popen(
        [sys.executable, *how, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
