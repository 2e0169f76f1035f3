"""Shapes of all formats in a user's folder, with what lies beside them and what is broken."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import trimesh

from sparsepipe.data.points import SPLITS
from sparsepipe.data.sources import CacheSettings, ClassFolder
from tests.support.command_line import composed


def write_mixed(root: Path) -> None:
    """Balls and boxes in every format, clouds of unequal length, and what lies beside them."""
    rng = np.random.default_rng(0)
    meshes = {"ball": trimesh.creation.icosphere(3), "box": trimesh.creation.box((2, 2, 2))}
    for name, mesh in meshes.items():
        folder = root / name
        (folder / "textures").mkdir(parents=True)
        for suffix in ("stl", "obj", "ply", "off", "glb"):
            mesh.export(folder / f"p0.{suffix}")
        cloud_Q3 = mesh.sample(2000, seed=1)
        np.save(folder / "p1.npy", cloud_Q3)
        np.savez(folder / "p1.npz", points=cloud_Q3)
        np.savetxt(folder / "p1.txt", cloud_Q3[:700], delimiter=",")
        np.savetxt(folder / "p2.csv", cloud_Q3[:150], delimiter=";", header="x;y;z", comments="")
        np.savetxt(folder / "p3.xyz", np.hstack([cloud_Q3, rng.random((2000, 3))]))
        trimesh.PointCloud(cloud_Q3).export(folder / "p4.ply")
        for other in ("p0.mtl", "p0.png", ".DS_Store", "textures/wood.jpg"):
            (folder / other).touch()
    (root / "README.txt").touch()
    (root / "pictures").mkdir()
    (root / "pictures" / "ball.png").touch()
    (root / "box" / "broken.stl").write_text("solid")
    (root / "box" / "short.npz").write_bytes(b"PK")
    os.mkfifo(root / "box" / "pipe.stl")


def test_shapes_of_all_formats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    root = tmp_path / "shapes"
    write_mixed(root)
    place = [f"data.root={root}", f"data.cache_dir={tmp_path / 'cache'}", "data.num_points=500"]
    few = ["data.cached_points=800", "data.cache_workers=1", "data.split=0.3", "data.batch_size=4"]
    spec = composed("data=folder", *place, *few)
    data = spec.data.build()
    data.prepare_data()
    data.setup()
    seen = list[str]()
    for split in SPLITS:
        points = data.samples(split)
        for index, (file, label) in enumerate(zip(points.files, points.labels_S, strict=True)):
            name = points.classes[label]
            order = 2 if name == "ball" else np.inf
            norms = np.linalg.norm(points.cloud(index), ord=order, axis=1)
            assert np.allclose(norms, 1, atol=0.06), file  # their box is moved
            assert Path(file).parent.name == name
            seen.append(Path(file).name)
    assert Counter(seen) == {
        **{f"p0.{suffix}": 2 for suffix in ("stl", "obj", "ply", "off", "glb")},
        **dict.fromkeys(["p1.npy", "p1.npz", "p1.txt", "p2.csv", "p3.xyz", "p4.ply"], 2),
    }
    said = caplog.text
    assert "other files and folders are ignored: ball/p0.mtl, ball/p0.png" in said
    assert re.search(r"repeat points .*the smallest 150 \(\S+/p2\.csv\)", said)
    assert all(fault in said for fault in ("broken.stl holds no shape", "short.npz", "pipe.stl"))
    batch = next(iter(data.train_dataloader()))
    assert batch["label"].shape == (4,)
    fingerprint = data.fingerprint()
    elsewhere = root.rename(tmp_path / "elsewhere")
    moved = composed("data=folder", f"data.root={elsewhere}", *place[1:], *few).data.build()
    assert moved.fingerprint() == fingerprint
    other = ClassFolder(elsewhere, split=0.5).fingerprint(CacheSettings(directory=tmp_path / "c"))
    assert fingerprint != other, "how shapes are divided is part of what was read"
