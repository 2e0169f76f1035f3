"""Formats of files and folders with one scene each.

``READERS`` maps suffixes to functions from a path to columns. A new format needs such a function
and a line in that table. Shapes: P points, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, explaining_file
from sparsepipe.data.formats.clouds import read_las, read_pcd, read_text_table
from sparsepipe.data.formats.ply import read_elements

Columns = Mapping[str, NDArray[Any]]
"""Arrays [P] or [P, C] by name, in the file's units; a table without names is ``points``."""
_COORDS, _ANNOTATIONS = "coord.npy", "Annotations"
"""What the folder of a scene has: of Pointcept's prepared data sets, and of a room of S3DIS."""
_RGB, _XYZ = ("red", "green", "blue"), ("x", "y", "z")
_NAMES: dict[str, dict[int, tuple[str, ...]]] = {
    ".bin": {4: (*_XYZ, "intensity")},
    ".pts": {4: (*_XYZ, "intensity"), 6: (*_XYZ, *_RGB), 7: (*_XYZ, "intensity", *_RGB)},
    "": {6: (*_XYZ, *_RGB)},
}
"""Names of the columns of formats without names, by suffix and number of columns."""


def _ply(path: Path) -> Columns:
    vertex = read_elements(path).get("vertex", {})
    return {name: values for name, (lengths, values) in vertex.items() if (lengths == 1).all()}


def _npz(path: Path) -> Columns:
    if not is_zipfile(path):
        raise ValueError("it is not an npz archive, or is cut off")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _npy(path: Path) -> Columns:
    array = open_memmap(path, mode="r")
    names = array.dtype.names
    return {name: array[name] for name in names} if names else {"points": array}


def _h5(path: Path) -> Columns:
    with import_module("h5py").File(path) as file:
        return {name: each[()] for name, each in file.items() if hasattr(each, "shape")}


def _text(path: Path) -> Columns:
    names, table_PC = read_text_table(path)
    return dict(zip(names, table_PC.T, strict=True)) if names else {"points": table_PC}


def _bin(path: Path) -> Columns:
    columns = {"points": np.fromfile(path, "<f4")}
    for label in label_files(path):
        columns["label"] = np.fromfile(label, "<u4") & 0xFFFF  # above these are instances
    return columns


def _folder(path: Path) -> Columns:
    is_arrays, tables = (path / _COORDS).is_file(), dict[str, NDArray[Any]]()
    for each in members_of(path):
        remedy = "restore it, or leave out its scene"
        with explaining_file(each, what="cannot be read", extra="scenes", remedy=remedy):
            tables[each.stem] = (_npy if is_arrays else _text)(each)["points"]
    if is_arrays:
        return tables
    classes = [name.rpartition("_")[0] for name in tables]
    label_P = np.repeat(np.array(classes), [len(table) for table in tables.values()])
    return {"points": np.concatenate([*tables.values()]), "label": label_P}


READERS: dict[str, Callable[[Path], Columns]] = {
    ".bin": _bin,
    ".csv": _text,
    ".h5": _h5,
    ".hdf5": _h5,
    ".las": read_las,
    ".laz": read_las,
    ".npy": _npy,
    ".npz": _npz,
    ".pcd": read_pcd,
    ".ply": _ply,
    ".pts": _text,
    ".txt": _text,
    ".xyz": _text,
}
"""The function that reads files of a suffix, which is in lower case."""


def is_scene(path: Path) -> bool:
    """Returns whether a path is a file with a suffix of :data:`READERS`, or a scene's folder."""
    in_folder = (path / _COORDS).is_file() or (path / _ANNOTATIONS).is_dir()
    return in_folder or (path.suffix.lower() in READERS and path.exists() and not path.is_dir())


def label_files(path: Path) -> list[Path]:
    """Returns the ``.label`` file of a ``.bin`` file, beside it or in SemanticKITTI's folder."""
    name = f"{path.stem}.label"
    found = [folder / name for folder in (path.parent, path.parent.parent / "labels")]
    return [each for each in found if path.suffix.lower() == ".bin" and each.is_file()][:1]


def members_of(path: Path) -> list[Path]:
    """Returns the files of which a scene consists."""
    if not path.is_dir():
        return [path, *label_files(path)]
    pattern = "*.npy" if (path / _COORDS).is_file() else f"{_ANNOTATIONS}/*.txt"
    return sorted(each for each in path.glob(pattern) if each.name[0] not in "._")


def read_columns(path: Path, *, names: Sequence[str] = ()) -> Columns:
    """Returns the columns of a scene's file or folder.

    Args:
        path: the file, with a suffix of :data:`READERS`, or the folder.
        names: names of the columns of a table without names; empty: those usual in its format.
    """
    for member in members_of(path):
        check_regular(member)
    suffix = "" if path.is_dir() else path.suffix.lower()
    columns = dict((READERS[suffix] if suffix else _folder)(path))
    if (table := columns.get("points")) is None or table.shape[1:] == (3,):
        return columns
    if suffix == ".bin":  # whose number of columns stands nowhere
        width = len(names) or 4
        table = table[: len(table) // width * width].reshape(-1, width)
        if table.size < columns["points"].size:
            raise ValueError(f"its {columns['points'].size} numbers are not rows of {width}")
    width = table.shape[1] if table.ndim == 2 else 0
    names = names or _NAMES.get(suffix, {}).get(width, ())
    if len(names) != width:
        raise ValueError(
            f"its array {list(table.shape)} is not a table with {len(names) or 'named'} columns; "
            "data.columns names those of a table, such as [x,y,z,red,green,blue,label]"
        )
    del columns["points"]
    return {**dict(zip(names, table.T, strict=True)), **columns}
