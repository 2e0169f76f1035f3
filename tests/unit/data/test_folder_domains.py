"""Domains in a user's folders: shapes and images, with and without labels and splits."""

from __future__ import annotations

import logging
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from PIL import Image

from sparsepipe.data import (
    FolderDomains,
    ImageDataModule,
    ImageFolder,
    ShapeDataModule,
)
from sparsepipe.data.formats.off import write_off
from sparsepipe.data.sources import CacheSettings, shape_folder
from sparsepipe.errors import ConfigError, DataError
from tests.support.command_line import composed

COLOURS = {"red": (200, 0, 0), "green": (0, 200, 0)}


def write_images(root: Path, *, flat: bool = False, count: int = 5, size: int = 40) -> None:
    """Images with a bright corner at the upper left, in folders of their colours or in one."""
    for name, colour in COLOURS.items():
        folder = root if flat else root / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.zeros((size, size + number, 3), np.uint8)
            pixels[: size // 2, : size // 2] = colour
            suffix = ".png" if number % 2 else ".jpg"
            Image.fromarray(pixels).save(folder / f"{name}_{number}{suffix}")


def images(root: Path, cache: Path, **more: Any) -> FolderDomains:
    source = partial(ImageFolder, size=(12, 10), channels=3)
    module = partial(ImageDataModule, source=source)
    settings = {"source": "studio", "cache_dir": cache, "batch_size": 4, **more}
    return FolderDomains(root, module=module, **settings)


def ready(data: FolderDomains) -> FolderDomains:
    data.prepare_data()
    data.setup()
    return data


@pytest.fixture
def studio(tmp_path: Path) -> Path:
    """Domains of images: a labelled one, and one without labels."""
    write_images(tmp_path / "photos" / "studio")
    write_images(tmp_path / "photos" / "phone", flat=True, count=3)
    return tmp_path / "photos"


def test_images(studio: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = ready(images(studio, tmp_path / "cache"))
    data.setup("test")
    assert data.domains == ("studio", "phone")
    assert data.classes == ("green", "red")
    assert caplog.text.count("without labels are evaluated without accuracy: phone") == 1
    assert "are ignored in training" not in caplog.text
    batch, *_ = next(iter(data.train_dataloader()))
    for name, each in batch.items():
        assert each["input"].shape == (4, 3, 12, 10)
        corner = each["input"][:, :, :4, :3].mean((2, 3))
        if name == "studio":
            assert each["label"].tolist() == (corner[:, 0] > corner[:, 1]).long().tolist()
        else:
            assert each["label"].tolist() == [-1] * 4
        assert (corner.amax(1) > 0.7).all(), "the corner stays where it is"
        assert each["input"][:, :, 7:].max() < 0.1
    tested = list(data.test_dataloader())
    assert {each["domain"] for each in tested} == {"studio", "phone"}
    again = images(studio, tmp_path / "other")
    before = data.fingerprint()
    assert again.fingerprint() == before
    Image.new("RGB", (9, 9)).save(studio / "phone" / "red_0.jpg")
    assert images(studio, tmp_path / "other").fingerprint() != before


def test_labels_of_targets_are_for_evaluations(
    studio: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_images(studio / "scanner")
    data = ready(images(studio, tmp_path / "cache"))
    data.setup("test")
    said = "are ignored in training and used only in evaluations: scanner"
    assert caplog.text.count(said) == 1
    chosen = images(studio, tmp_path / "cache", targets=["scanner"])
    assert chosen.domains == ("studio", "scanner")
    with pytest.raises(ConfigError, match=r"data\.targets=\['studio'\] is not"):
        images(studio, tmp_path / "cache", targets=["studio"])


def test_grey_images_and_faults(studio: Path, tmp_path: Path) -> None:
    grey = ImageFolder(studio / "phone", channels=1).load("train", tmp_path)
    assert grey.image(0).shape == (1, 28, 28)
    Image.fromarray(np.zeros((9, 9), np.uint16)).save(studio / "phone" / "deep.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        ready(images(studio, tmp_path / "cache"))
    pages = [Image.new("L", (9, 9), colour) for colour in (0, 9)]
    pages[0].save(studio / "phone" / "pages.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match=r"pages.tif has 2 images"):
        ready(images(studio, tmp_path / "cache"))
    preview = [Image.new("L", (3, 3))]
    pages[0].save(studio / "phone" / "pages.tif", save_all=True, append_images=preview)
    whole = (studio / "studio" / "red" / "red_0.jpg").read_bytes()
    Image.new("1", (9, 9)).save(tmp_path / "huge.png")
    huge = bytearray((tmp_path / "huge.png").read_bytes())
    huge[16:24] = np.array([30_000, 30_000], ">u4").tobytes()  # and the check sum of both
    huge[29:33] = np.array([zlib.crc32(huge[12:29])], ">u4").tobytes()
    for raw in (b"no image", whole[: len(whole) // 2], bytes(huge)):
        (studio / "phone" / "deep.png").write_bytes(raw)
        with pytest.raises(DataError, match=r"deep\.png: "):
            ready(images(studio, tmp_path / "cache"))
    for wrong in ({"channels": 2}, {"size": (28,)}):
        with pytest.raises(ConfigError, match="are not valid"):
            ImageFolder(studio / "phone", **wrong)  # type: ignore[arg-type]


def test_photographs_are_turned_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by 180 degrees
    pixels = np.zeros((20, 20, 3), np.uint8)
    pixels[:10] = 255
    for number in range(2):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png", exif=exif)
    found = ImageFolder(tmp_path).load("train", tmp_path / "cache").image(0)
    assert found[:, :10].max() < 0.1
    assert found[:, 18:].min() > 0.9


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "settings", "word"),
    [
        (
            lambda root: None,
            {"source": None},
            r"data\.source is not set.* phone, scanner, studio",
        ),
        (lambda root: None, {"source": "moon"}, "'moon' is not a domain"),
        (lambda root: None, {"source": "phone"}, "the source phone has samples without labels"),
        (
            lambda root: (root / "studio" / "red").rename(root / "studio" / "rot"),
            {},
            "the domain scanner has the classes green, red, but the source has green, rot",
        ),
        (lambda root: (root / "empty").mkdir(), {}, "empty has no train files"),
        (
            lambda root: [shutil.rmtree(root / name) for name in ("phone", "scanner")],
            {},
            "one for each domain, but has studio",
        ),
    ],
)
def test_refusals(
    studio: Path, tmp_path: Path, change: Change, settings: dict[str, Any], word: str
) -> None:
    write_images(studio / "scanner")
    change(studio)
    with pytest.raises((ConfigError, DataError), match=word) as caught:
        ready(images(studio, tmp_path / "cache", **settings))
    assert caught.value.remedy
    with pytest.raises(DataError, match=r"data\.root=null"):
        images(None, tmp_path / "cache")  # type: ignore[arg-type]


def write_shapes(root: Path) -> None:
    """CAD meshes in classes, and scans in each format, as files and as a bundle."""
    rng = np.random.default_rng(0)
    for name in ("ball", "box"):
        for number in range(4):
            mesh = _mesh(name)
            write_off(mesh, root / "cad" / name / f"{name}_{number}.off")
    flat = root / "scans"
    flat.mkdir()
    clouds = [_mesh(name).sample(300, seed=1) for name in ("ball", "box")]
    np.save(flat / "a.npy", np.hstack([clouds[0], np.ones((300, 3))]))
    np.savetxt(flat / "b.xyz", clouds[1])
    trimesh.PointCloud(clouds[0]).export(flat / "c.ply")
    for suffix in ("ply", "stl", "obj", "glb", "off"):
        _mesh("box").export(flat / f"mesh_{suffix}.{suffix}")
    (root / "bundle").mkdir()
    for split in ("train", "test"):
        np.savez(root / "bundle" / f"{split}.npz", points=rng.random((3, 300, 3)))


def _mesh(name: str) -> trimesh.Trimesh:
    return trimesh.creation.icosphere(2) if name == "ball" else trimesh.creation.box((2, 2, 2))


def shapes(root: Path, cache: Path, **more: Any) -> FolderDomains:
    module = partial(
        ShapeDataModule,
        source=shape_folder,
        resolution=8,
        span="cube",
        num_points=200,
        cached_points=256,
        cache_workers=1,
    )
    return FolderDomains(root, module=module, source="cad", cache_dir=cache, batch_size=4, **more)


def test_shapes(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data")
    data = ready(shapes(tmp_path / "data", tmp_path / "cache"))
    assert data.domains == ("cad", "bundle", "scans")
    assert data.classes == ("ball", "box")
    batch, *_ = next(iter(data.train_dataloader()))
    assert all(each["input"].batch_size == 4 for each in batch.values())
    assert {*batch["cad"]["label"].tolist()} <= {0, 1}
    assert batch["scans"]["label"].tolist() == batch["bundle"]["label"].tolist() == [-1] * 4
    assert data.fingerprint() == shapes(tmp_path / "data", tmp_path / "other").fingerprint()


def test_bundles_need_labels_elsewhere(tmp_path: Path) -> None:
    from sparsepipe.data import NpzBundle

    write_shapes(tmp_path)
    settings = CacheSettings(directory=tmp_path / "cache")
    with pytest.raises(DataError, match="lacks classes"):
        NpzBundle(tmp_path / "bundle").load("train", settings)
    with np.load(tmp_path / "bundle" / "train.npz") as file:
        np.savez(tmp_path / "bundle" / "train.npz", points=file["points"], labels=[0, 1, 0])
    with pytest.raises(DataError, match="lacks classes"):
        NpzBundle(tmp_path / "bundle", needs_labels=False).load("train", settings)


@pytest.mark.parametrize(
    ("group", "model", "write"),
    [("shape_folders", "dsn_sparse", write_shapes), ("image_folders", "dsn_2d", None)],
)
def test_groups(
    studio: Path, tmp_path: Path, group: str, model: str, write: Callable[[Path], None] | None
) -> None:
    root, source = studio, "studio"
    if write is not None:
        root, source = tmp_path / "shapes", "cad"
        write(root)
    few = ["data.module.num_points=200"] if write is not None else []  # the bundle has 300
    place = [f"data.root={root}", f"data.source={source}", f"data.cache_dir={tmp_path / 'cache'}"]
    spec = composed(f"data={group}", f"model={model}", *place, *few)
    data = spec.data.build()
    data.prepare_data()
    data.setup()
    assert data.domains[0] == source
    assert len(next(iter(data.train_dataloader()))[0]) == len(data.domains)
    elsewhere = composed(f"data={group}", f"model={model}", "data.root=other", place[1], *few)
    assert spec.identity() == elsewhere.identity(), "data are told apart by what is in them"
