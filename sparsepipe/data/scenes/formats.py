"""Formats of files and folders with one scene each.

``READERS`` maps suffixes to functions from a path to columns: arrays [P] or [P, k] by name, in the
file's units. A new format needs such a function and a line in that table. Shapes: P points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.formats.ply import read_elements

Columns = Mapping[str, NDArray[Any]]
"""Arrays [P] or [P, k] by name."""
COORDS = "coord.npy"
"""A folder with this file is a scene, as Pointcept prepares data sets."""


def _ply(path: Path, names: Sequence[str]) -> Columns:
    vertex = read_elements(path).get("vertex", {})
    return {name: values for name, (lengths, values) in vertex.items() if (lengths == 1).all()}


def _npz(path: Path, names: Sequence[str]) -> Columns:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _array_folder(path: Path, names: Sequence[str]) -> Columns:
    return {each.stem: np.load(each, allow_pickle=False) for each in sorted(path.glob("*.npy"))}


READERS: dict[str, Callable[[Path, Sequence[str]], Columns]] = {
    ".npz": _npz,
    ".ply": _ply,
}
"""The function that reads files of a suffix, which is in lower case; it gets a path and the names
of columns, for files that do not name them.
"""


def is_scene(path: Path) -> bool:
    """Whether a path is that of a scene: a file with a suffix of a format, or a scene's folder."""
    return path.suffix.lower() in READERS or (path / COORDS).is_file()


def members_of(path: Path) -> list[Path]:
    """Returns the files of which a scene consists."""
    return sorted(path.glob("*.npy")) if path.is_dir() else [path]


def read_columns(path: Path, *, names: Sequence[str] = ()) -> Columns:
    """Returns the columns of a scene's file or folder; ``names``: of columns without names."""
    return (_array_folder if path.is_dir() else READERS[path.suffix.lower()])(path, names)
