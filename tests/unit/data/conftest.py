"""Small data sets in each layout."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh

from sparsepipe.data import OffTree, ShapeDataModule
from sparsepipe.data.formats.off import write_off
from sparsepipe.data.sources import CacheSettings

CLASSES = ("ball", "box", "rod")


def make_mesh(class_name: str, rng: np.random.Generator) -> trimesh.Trimesh:
    size = rng.uniform(0.5, 2.0, 3)
    if class_name == "ball":
        mesh = trimesh.creation.icosphere(subdivisions=1)
        mesh.apply_scale(size)
        return mesh
    if class_name == "box":
        return trimesh.creation.box(size)
    return trimesh.creation.cylinder(radius=size[0] / 4, height=size[2], sections=12)


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Writes OFF meshes in ModelNet's layout, ``per_class`` for each class and split."""

    def make(per_class: int = 4, *, test_per_class: int | None = None, name: str = "tree") -> Path:
        root = tmp_path / name
        rng = np.random.default_rng(7)
        counts = {"train": per_class, "test": test_per_class or per_class}
        for class_name in CLASSES:
            for split, count in counts.items():
                folder = root / class_name / split
                folder.mkdir(parents=True)
                for number in range(count):
                    path = folder / f"{class_name}_{number:04}.off"
                    write_off(make_mesh(class_name, rng), path)
        return root

    return make


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """An npz bundle of quantised clouds: 12 training and 7 test shapes of 3 classes."""
    root = tmp_path / "bundle"
    root.mkdir()
    rng = np.random.default_rng(3)
    for split, count in (("train", 12), ("test", 7)):
        points = rng.integers(-32000, 32000, (count, 128, 3)).astype(np.int16)
        points[:, :, 2] //= 3
        np.savez_compressed(
            root / f"{split}.npz",
            points=points,
            labels=(np.arange(count) % 3).astype(np.uint8),
            names=np.array([f"thing_{number}" for number in range(count)]),
            classes=np.array(CLASSES),
            scale=np.float32(3.125e-05),
        )
    return root


@pytest.fixture
def small_disk_or_none(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 3 MiB; None where this process may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        yield None
        return
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def small_disk(small_disk_or_none: Path | None) -> Path:
    """A file system of 3 MiB."""
    if small_disk_or_none is None:
        pytest.skip("mounting a tmpfs needs privileges that this process does not have")
    return small_disk_or_none


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., ShapeDataModule]:
    def make(root: Path, **settings: Any) -> ShapeDataModule:
        defaults: dict[str, Any] = {
            "source": OffTree,
            "cache_dir": tmp_path / "cache",
            "resolution": 16,
            "cached_points": 512,
            "num_points": 200,
            "batch_size": 4,
            "num_workers": 0,
            "cache_workers": 1,
        }
        data = ShapeDataModule(root, **{**defaults, **settings})
        data.prepare_data()
        data.setup()
        return data

    return make


@pytest.fixture
def eager_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes start for a small tree, too, where a test asks for them."""
    monkeypatch.setattr("sparsepipe.data.cache._SECONDS_PER_WORKER", 0.01)


@pytest.fixture
def settings(tmp_path: Path) -> CacheSettings:
    return CacheSettings(directory=tmp_path / "cache", points=64, workers=1)
