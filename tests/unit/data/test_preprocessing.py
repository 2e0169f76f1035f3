"""A single cloud becomes the input that it is in the test of each kind of source."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsepipe.data import NormalResampled, NpzBundle, ShapeDataModule
from sparsepipe.data.preprocessing import Preprocessing
from sparsepipe.errors import DataError

POINTS, SHAPES = 60, 4


@pytest.fixture
def clouds(tmp_path: Path) -> list[np.ndarray]:
    """Written as both kinds of sources have them, with six decimals."""
    rng = np.random.default_rng(0)
    clouds = [np.round(rng.normal(size=(POINTS, 3)), 6) for _ in range(SHAPES)]
    (tmp_path / "ball").mkdir()
    (tmp_path / "modelnet40_shape_names.txt").write_text("ball\n")
    for split in ("train", "test"):
        np.savez(
            tmp_path / f"{split}.npz",
            points=np.array(clouds, np.float32),
            labels=np.zeros(SHAPES, np.int64),
            classes=np.array(["ball"]),
        )
        names = "".join(f"ball_{number}\n" for number in range(SHAPES))
        (tmp_path / f"modelnet40_{split}.txt").write_text(names)
    for number, cloud in enumerate(clouds):
        lines = np.hstack([cloud, np.zeros((POINTS, 3))])
        np.savetxt(tmp_path / "ball" / f"ball_{number}.txt", lines, fmt="%.6f", delimiter=",")
    return clouds


def data_of(kind: type, root: Path, **settings: object) -> ShapeDataModule:
    data = ShapeDataModule(
        root,
        source=kind,
        cache_dir=root / "cache",
        resolution=24,
        batch_size=1,
        num_workers=0,
        **settings,  # type: ignore[arg-type]
    )
    data.setup("test")
    return data


def coords(preprocess: Preprocessing, shape: object) -> torch.Tensor:
    x = preprocess(shape)
    assert not isinstance(x, torch.Tensor)
    return x.coords


@pytest.mark.parametrize("span", ["extent", "cube", "sphere"])
@pytest.mark.parametrize(
    ("kind", "stored"), [(NpzBundle, "all"), (partial(NormalResampled, subset=40), "first")]
)
def test_a_cloud_is_read_as_in_the_test(
    clouds: list[np.ndarray], tmp_path: Path, kind: type, stored: str, span: str
) -> None:
    """All stored points are drawn, so that nothing is random."""
    data = data_of(kind, tmp_path, num_points=None, cached_points=50, span=span)
    preprocess = data.preprocessing()
    assert (preprocess.keeps_clouds, preprocess.sampler.first) == (stored == "all", stored != "all")
    for cloud, batch in zip(clouds, data.test_dataloader(), strict=True):
        own = cloud.astype(np.float32) if stored == "all" else cloud
        assert torch.equal(coords(preprocess, own), batch["input"].coords)
    if stored == "first":
        from_file = coords(preprocess, tmp_path / "ball" / "ball_3.txt")
        assert torch.equal(from_file, batch["input"].coords)
        assert not torch.equal(coords(preprocess, clouds[3][::-1]), from_file), (
            "other ones are first"
        )


def test_the_draw_depends_on_the_content_and_the_seed(
    clouds: list[np.ndarray], tmp_path: Path
) -> None:
    first, again, other = (
        data_of(NpzBundle, tmp_path, num_points=20, seed=seed).preprocessing() for seed in (0, 0, 1)
    )
    drawn = coords(first, clouds[0])
    assert len(drawn) <= 20
    assert torch.equal(drawn, coords(again, clouds[0]))
    assert torch.equal(drawn, coords(first, clouds[0].copy(order="F")))
    assert not torch.equal(drawn, coords(other, clouds[0]))
    assert not torch.equal(drawn, coords(first, clouds[1]))
    few = coords(first, clouds[0][:3])
    assert len(few) == 3, "which are repeated, each the same voxel"


def test_a_cloud_has_no_surface(clouds: list[np.ndarray], tmp_path: Path) -> None:
    data = data_of(NpzBundle, tmp_path, num_points=None)
    preprocess = data.preprocessing()
    surface = replace(preprocess.voxelisation, representation="dense_surface")
    of_surfaces = replace(preprocess, voxelisation=surface)
    with pytest.raises(DataError, match="surfaces of meshes"):
        of_surfaces(clouds[0])
    with pytest.raises(DataError, match=r"ball_0\.txt: the network was trained on surfaces"):
        of_surfaces(tmp_path / "ball" / "ball_0.txt")
