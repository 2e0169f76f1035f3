"""A user's own shapes in folders of classes, however they are divided, and other files beside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import trimesh

from sparsepipe.data.points import SPLITS
from sparsepipe.data.sources import CacheSettings, ClassFolder, OffTree
from sparsepipe.data.sources.base import SAID, said_so_far, say_once, saying_nothing
from sparsepipe.errors import ConfigError, DataError
from tests.support.command_line import composed
from tests.support.paths import python_path


@pytest.fixture(autouse=True)
def _said_anew(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("sparsepipe.data.sources.base._said", set())


def touched(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def divided(root: Path, split: float | str | None = None, seed: int = 0) -> dict[str, set[str]]:
    source = ClassFolder(root, split=split, seed=seed)
    found = source.listings
    for each in found.values():
        of = [next(p for p in name.split("/") if p.lower() not in SPLITS) for name in each.names]
        assert [each.classes[label] for label in each.labels_S] == of
    return {split: {*each.names} for split, each in found.items()}


MANY = [f"ant/{n}.stl" for n in range(23)] + [
    f"bee/{n}.{s}" for n in range(4) for s in ("ply", "glb")
]


@pytest.mark.parametrize("share", [None, 0.2, 0.5, 0.01])
def test_a_share_of_each_class_is_for_testing(tmp_path: Path, share: float | None) -> None:
    touched(tmp_path, *MANY, "cat/1.off")
    found = divided(tmp_path, share)
    assert found["train"] | found["test"] == {*MANY, "cat/1.off"}
    assert not found["train"] & found["test"]
    counts = Counter(name.split("/")[0] for name in found["test"])
    for name, files in (("ant", 23), ("bee", 8)):
        assert counts[name] == max(1, round(files * (share or 0.2)))
    assert counts["cat"] == 0, "the only shape of a class is for training"
    assert divided(tmp_path, share) == found
    assert divided(tmp_path, share, seed=1) != found


def test_new_files_and_classes_leave_the_others_where_they_are(tmp_path: Path) -> None:
    before = divided(touched(tmp_path, *MANY))
    after = divided(touched(tmp_path, "aardvark/1.stl", "aardvark/2.stl", "bee/9.stl"))
    assert len(before["test"] & after["test"]) >= len(before["test"]) - 1


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ({"ant/train/1.stl", "bee/train/1.obj"}, {"ant/test/2.ply", "bee/test/9.npz"}),
        ({"train/ant/1.stl", "train/bee/1.txt"}, {"test/ant/1.stl"}),
        ({"Train/ant/1.stl"}, {"TEST/ant/1.STL"}),
    ],
)
def test_folders_divide(tmp_path: Path, train: set[str], test: set[str]) -> None:
    touched(tmp_path, *train, *test)
    assert divided(tmp_path) == {"train": train, "test": test}
    with pytest.raises(ConfigError, match="has folders train and test, such as"):
        ClassFolder(tmp_path, split=0.5)


@pytest.mark.parametrize("delimiter", [",", "; "])
def test_a_table_divides(tmp_path: Path, delimiter: str, caplog: pytest.LogCaptureFixture) -> None:
    root = touched(tmp_path / "shapes", *MANY)
    rows = [["file", "split", "by"], ["ant/3.stl", "train", "me"], ["./bee/0.ply", "Train", "me"],
            [str(root / "bee/0.glb"), "test", ""]]  # fmt: skip
    path = tmp_path / "split.csv"
    path.write_text("\ufeff" + "\n".join(delimiter.join(row) for row in rows) + "\n")
    assert divided(root, str(path)) == {"train": {"ant/3.stl", "bee/0.ply"}, "test": {"bee/0.glb"}}
    assert "28 shapes that" in caplog.text
    (root / "mine.csv").write_text(path.read_text())
    assert divided(root, "mine.csv") == divided(root, str(path))


TABLES = {
    "absent file": ("file,split\nant/99.stl,test\n", "names files that are not in .*: ant/99.stl"),
    "other split": ("file,split\nant/1.stl,val\n", r"line 2, has the split 'val' for ant/1.stl"),
    "both": ("file,split\nant/1.stl,test\nant/1.stl,train\n", "line 3, .* has in the other one"),
    "columns": ("path,split\nant/1.stl,test\n", "has no column file"),
    "lacking": ("file,split\nant/1.stl\n", "line 2, lacks a file or its split"),
    "empty": ("", "has no column file and split"),
    "no training": ("file,split\nant/1.stl,test\n", "has no train shape"),
    "binary": (None, "no text in UTF-8"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_that_are_refused(tmp_path: Path, kind: str) -> None:
    root, path = touched(tmp_path / "shapes", *MANY), tmp_path / "split.csv"
    text, message = TABLES[kind]
    path.write_bytes(bytes(range(256)) * 99 if text is None else text.encode())
    with pytest.raises(DataError, match=message) as caught:
        ClassFolder(root, split=str(path))
    assert caught.value.remedy
    assert str(path) in caught.value.message or kind == "no training"


def test_other_refusals(tmp_path: Path) -> None:
    root = touched(tmp_path / "shapes", *MANY)
    for split in (0, 1, -0.5, float("nan"), True):
        with pytest.raises(ConfigError, match=r"data\.split=.* is not valid"):
            ClassFolder(root, split=split)
    with pytest.raises(DataError, match=r"data\.split=half is neither a share nor a csv file"):
        ClassFolder(root, split="half")
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(DataError, match="is a pipe, not a regular file"):
        ClassFolder(root, split=str(tmp_path / "pipe.csv"))
    with pytest.raises(DataError, match="should hold a folder of shapes") as caught:
        ClassFolder(tmp_path)
    assert caught.value.remedy == f"set data.root={root} (with data=folder)"
    with pytest.raises(DataError, match="should hold a folder of shapes"):
        ClassFolder(root / "ant")
    (root / "bee" / "train").mkdir()
    touched(root, "bee/train/1.stl")
    with pytest.raises(
        DataError, match=r"bee/train/1.stl in a folder train or test, and ant/0.stl"
    ):
        ClassFolder(root)
    touched(tmp_path / "one", "ant/1.stl")
    with pytest.raises(DataError, match="has no test shape"):
        ClassFolder(tmp_path / "one")
    touched(tmp_path / "half", "ant/train/1.stl", "bee/test/1.stl")
    with pytest.raises(DataError, match="has no train shape of class bee"):
        ClassFolder(tmp_path / "half")


def test_classes_that_are_no_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/M\xfcnze"
    os.mkdir(folder)
    for number in range(2):
        Path(os.fsdecode(folder), f"{number}.stl").touch()
    with pytest.raises(DataError, match=r"'M\\udcfcnze', which is not text in UTF-8"):
        ClassFolder(tmp_path)


def test_a_tree_without_off_files_names_the_group(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        OffTree(touched(tmp_path / "a", *MANY)).listing("train")
    assert caught.value.remedy == "use data=folder, which reads this layout"
    with pytest.raises(DataError) as caught:
        OffTree(touched(tmp_path / "b", "ant/train/1.stl", "ant/test/1.stl")).listing("train")
    assert "data=folder" in caught.value.remedy


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
        points = data.point_set(split)
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
    assert "passed over are 8 files (3 .png, 2 hidden, 2 .mtl, 1 .txt) and 2 folders" in said
    assert "1 folder without shapes (pictures)" in said
    assert said.count("clouds have fewer points than the 500 of data.num_points") in (1, 2)
    assert re.search(r"the fewest 150 \(\S+/p2\.csv\): they are repeated", said)
    for fault in (
        "broken.stl holds no shape",
        "short.npz",
        "pipe.stl cannot be read: it is a pipe, not a regular",
    ):
        assert fault in said
    assert "remedy: replace" in said
    batch = next(iter(data.train_dataloader()))
    assert batch["label"].shape == (4,)
    fingerprint = data.fingerprint()
    elsewhere = root.rename(tmp_path / "elsewhere")
    moved = composed("data=folder", f"data.root={elsewhere}", *place[1:], *few).data.build()
    assert moved.fingerprint() == fingerprint
    other = ClassFolder(elsewhere, split=0.5).fingerprint(CacheSettings(directory=tmp_path / "c"))
    assert fingerprint != other, "how shapes are divided is part of what was read"


def test_ranks_do_not_repeat_what_the_process_that_starts_them_has_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with saying_nothing():
        say_once("2 files are passed over")
    assert not caplog.messages
    say_once("2 files are passed over")
    say_once("2 files are passed over")
    assert caplog.messages == ["2 files are passed over"]
    assert SAID not in os.environ, "other processes have not said it"
    program = (
        "import logging; logging.basicConfig(level='INFO', format='%(message)s')\n"
        "from sparsepipe.data.sources.base import say_once\n"
        "say_once('2 files are passed over'); say_once('3 files')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": python_path(), **said_so_far()},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ended.stderr.splitlines() == ["3 files"]
