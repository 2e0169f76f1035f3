"""Files of users' folders: their classes and splits, however divided, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from sparsepipe.data.listing import list_folder, read_table
from sparsepipe.data.points import SPLITS
from sparsepipe.errors import ConfigError, DataError

SUFFIXES = (".glb", ".nii.gz", ".off", ".ply", ".zarr")
Names = dict[str, list[str]]
TEN = [f"{number}.off" for number in range(8)]
MANY = [f"ant/{n}.off" for n in range(23)] + [
    f"bee/{n}.{s}" for n in range(4) for s in ("glb", "ply")
]


def touched(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


def listed(root: Path, split: float | str | None = None, **settings: object) -> Names:
    found = list_folder(root, suffixes=SUFFIXES, split=split, **settings)  # type: ignore[arg-type]
    for each in found.values():
        folders = [[p for p in n.split("/")[:-1] if p.lower() not in SPLITS] for n in each.names]
        expected = [each.classes.index(folder[0]) if folder else -1 for folder in folders]
        assert each.labels_S.tolist() == expected
        assert each.labels_S.dtype == np.int64
    return {split: [*each.names] for split, each in found.items()}


@pytest.mark.parametrize(
    ("names", "train", "test"),
    [
        (TEN, [TEN[n] for n in (0, 1, 2, 4, 5, 6)], [TEN[3], TEN[7]]),
        (["train/a.off", "test/b.off"], ["train/a.off"], ["test/b.off"]),
        (["Train/ant/1.off", "TEST/ant/1.OFF"], ["Train/ant/1.off"], ["TEST/ant/1.OFF"]),
        (["b/train/1.off", "a/train/1.off", "a/test/2.off"], ["a/train/1.off", "b/train/1.off"],
         ["a/test/2.off"]),
        (["b/1.off", "a/1.off", "a/2.off", "b/2.off"], ["a/1.off", "b/1.off"],
         ["a/2.off", "b/2.off"]),
        (["1.off", ".x/2.off", "__MACOSX/3.off", "4.off", ".5.off"], ["1.off"], ["4.off"]),
        (["a.zarr/0", "b.nii.gz", "c.txt"], ["a.zarr"], ["b.nii.gz"]),
    ],
)  # fmt: skip
def test_layouts(tmp_path: Path, names: list[str], train: list[str], test: list[str]) -> None:
    found = listed(touched(tmp_path, *names), share=0.25)
    assert found == {"train": train, "test": test}


@pytest.mark.parametrize("share", [None, 0.2, 0.5, 0.01])
def test_a_share_of_each_class_is_drawn_by_names(tmp_path: Path, share: float | None) -> None:
    touched(tmp_path, *MANY, "cat/1.off")
    found = listed(tmp_path, share, seed=0)
    assert {*found["train"]} ^ {*found["test"]} == {*MANY, "cat/1.off"}
    counts = Counter(name.split("/")[0] for name in found["test"])
    for name, files in (("ant", 23), ("bee", 8)):
        assert counts[name] == max(1, round(files * (share or 0.2)))
    assert counts["cat"] == 0, "the only file of a class is for training"
    assert listed(tmp_path, share, seed=1) != found
    touched(tmp_path, "aardvark/1.off", "aardvark/2.off", "bee/9.off")
    after = listed(tmp_path, share, seed=0)
    assert len({*found["test"]} - {*after["test"]}) <= 1, "new files leave others in their split"


@pytest.mark.parametrize("delimiter", [",", "; "])
def test_a_table_divides(tmp_path: Path, delimiter: str) -> None:
    root = touched(tmp_path / "shapes", *MANY)
    rows = [["file", "split", "by"], ["ant/3.off", "train", "me"], ["./bee/0.ply", "Train", "me"],
            [str(root / "bee/0.glb"), "test", ""]]  # fmt: skip
    path = tmp_path / "split.csv"
    path.write_text("\ufeff" + "\n".join(delimiter.join(row) for row in rows) + "\n")
    expected = {"train": ["ant/3.off", "bee/0.ply"], "test": ["bee/0.glb"]}
    assert listed(root, str(path)) == expected
    (root / "mine.csv").write_text(path.read_text())
    assert listed(root, "mine.csv") == expected


def test_what_is_passed_over_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    deep, others = "bee/textures/wood.off", ("README.txt", "ant/1.mtl")
    touched(tmp_path, *MANY, deep, *others, "0.off", ".hidden", "cat/1.step")
    for _ in range(2):
        found = listed(tmp_path, needs_classes=True)
        assert "0.off" not in (*found["train"], *found["test"])
    assert [each for each in caplog.messages if "ignored" in each] == [
        f"{tmp_path}: other files and folders are ignored: "
        "README.txt, ant/1.mtl, bee/textures/, cat/1.step, 0.off"
    ]
    assert "since these formats are not read: cat/*.step; " in caplog.text


ONE_CLASS_WITHOUT_TRAINING = ["ant/train/1.off", "bee/test/1.off"]


@pytest.mark.parametrize(
    ("names", "split", "named"),
    [
        ([], None, "train"),
        (["1.off"], None, "test"),
        (["ant/1.step", "ant/2.STEP", "bee/1.igs"], None, "not read: ant/*.STEP, ant/*.step, bee/"),
        (["ant/1.off", "2.off"], None, "ant/1.off"),
        (ONE_CLASS_WITHOUT_TRAINING, None, "bee"),
        (MANY, 1.0, "1.0"),
        (["train/1.off", "test/2.off"], 0.5, "0.5"),
        (MANY, "half", "half"),
        (MANY, "file,split\nant/99.off,test\n", "ant/99.off"),
        (MANY, "file,split\nant/1.off,val\n", "'val'"),
        (MANY, "file,split\nant/1.off,test\nant/1.off,train\n", "ant/1.off"),
        (MANY, "file,split\nant/1.off\n", "line 2"),
    ],
)
def test_refusals_name_the_value_and_a_remedy(
    tmp_path: Path, names: list[str], split: float | str | None, named: str
) -> None:
    root = touched(tmp_path / "shapes", *names)
    root.mkdir(exist_ok=True)
    if isinstance(split, str) and "\n" in split:
        (tmp_path / "split.csv").write_text(split)
        split = str(tmp_path / "split.csv")
    with pytest.raises((ConfigError, DataError)) as caught:
        listed(root, split)
    assert named in caught.value.message
    assert caught.value.remedy


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for content in (bytes(range(256)), b"a,b\n1,2,3\n"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=str(path)):
            read_table(path, columns=("a", "b"))
