"""Reading scenes: which columns of a file are positions, features and labels.

Shapes: P points, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, log_once, unreadable
from sparsepipe.data.points import FloatArray, IntArray
from sparsepipe.data.scenes.formats import READERS, Columns, is_scene, read_columns
from sparsepipe.data.scenes.scene import IGNORED, Scene
from sparsepipe.errors import DataError

_AXES = [[*"xyz"], [*"XYZ"]]
_JOINED = {
    "coord": ("coord", "coords", "points", "point", "xyz", "pos", "positions"),
    "color": ("color", "colors", "rgb", "colour", "colours"),
    "normal": ("normal", "normals"),
}
"""Names of arrays [P, 3]."""
_SINGLE = {
    "color": (["red", "green", "blue"], [*"rgb"], ["diffuse_red", "diffuse_green", "diffuse_blue"]),
    "normal": (["nx", "ny", "nz"], ["normal_x", "normal_y", "normal_z"]),
}
"""Names of three columns, of which the first found count."""
_OTHERS = {
    "intensity": ("intensity", "strength", "reflectance", "remission", "scalar_intensity"),
    "return_number": ("return_number", "scalar_return_number", "scalar_returnnumber"),
}
LABELS = (
    *("label", "labels", "segment", "segment20", "class", "classification", "semantic"),
    *("semantic_label", "semantic_labels", "sem_label", "seg_label", "scalar_label"),
    *("scalar_classification", "category"),
)
"""Names of columns of labels, in lower case; the first that a file has counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneReader:
    """Reads scenes of all formats, with the same labels and features.

    Attributes:
        features: names of features that are kept, besides the colour; None: all.
        columns: names of the columns of files that do not name them.
        label: name of the column of labels; None: one of ``LABELS``.
        classes: names of the classes; empty: unknown.
        numbers: class number of each label in files, -100 where it does not count; None: labels are
            class numbers, and negative ones do not count.
    """

    features: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    label: str | None = None
    classes: tuple[str, ...] = ()
    numbers: Mapping[int, int] | None = None

    def __call__(self, path: Path) -> Scene:
        """Returns the scene of a file or folder, with class numbers as labels.

        Raises:
            DataError: it is missing or not valid, or has labels that are not class numbers.
        """
        scene = self.read_raw(path)
        if scene.labels_P is None:
            return scene
        return replace(scene, labels_P=self.class_numbers(scene.labels_P, source=path))

    def read_raw(self, path: Path) -> Scene:
        """Returns the scene of a file or folder, with the labels that stand there."""
        if not is_scene(path):
            raise DataError(
                f"{path} is not a scene: its suffix is not that of a format"
                if path.exists()
                else f"{path} does not exist",
                remedy=f"give a file of {', '.join(READERS)}, or a folder of a scene",
            )
        try:
            if path.is_file():
                check_regular(path)
            return self._scene(read_columns(path, names=self.columns), path)
        except (DataError, MemoryError):
            raise
        except Exception as error:  # each format's reader raises its own types
            if isinstance(error, ImportError):
                raise DataError(
                    f"{path} needs the package {error.name}",
                    remedy="run pip install 'sparsepipe[scenes]'",
                ) from error
            if isinstance(error, OSError) and error.errno:
                raise unreadable(path, error) from error
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"{path} holds no scene that can be read: {why}",
                remedy="restore it, or leave it out",
            ) from error

    def class_numbers(self, labels_P: NDArray[Any], *, source: object) -> IntArray:
        """Returns the class numbers of labels in files; raises a DataError for unknown labels."""
        if self.numbers is None:
            known_P: IntArray = np.where(labels_P < 0, IGNORED, labels_P).astype(np.int64)
            is_known = known_P < (len(self.classes) or np.inf)
        else:
            keys = np.array(sorted(self.numbers), np.int64)
            places_P = np.searchsorted(keys, labels_P).clip(max=len(keys) - 1)
            known_P = np.array([self.numbers[int(key)] for key in keys])[places_P]
            is_known = keys[places_P] == labels_P
        if not is_known.all():
            some = np.unique(labels_P[~is_known])
            raise DataError(
                f"{source} has labels that are not of a class: "
                f"{', '.join(map(str, some[:10]))}{' and others' if len(some) > 10 else ''}",
                remedy="name all classes in data.classes, beginning with that of label 0; set "
                "data.ignore to labels that do not count; or map labels in data.learning_map",
            )
        return known_P

    def _scene(self, columns: Columns, path: Path) -> Scene:
        found = {name.lower(): values for name, values in columns.items()}
        label = self.label.lower() if self.label else next((n for n in LABELS if n in found), None)
        raw_P = None if label is None else found.pop(label, None)
        positions_P3 = _taken(found, "coord", [*_AXES])
        if positions_P3 is None or positions_P3.shape[1:] != (3,) or not len(positions_P3):
            raise ValueError(
                f"it has no points with x, y and z, but {', '.join(columns) or 'none'}"
            )
        features = dict[str, NDArray[Any]]()
        for name, single in _SINGLE.items():
            if (values := _taken(found, name, single)) is not None:
                features[name] = _as_color(values) if name == "color" else values
        for name, names in _OTHERS.items():
            for each in names:
                if each in found and name not in features:
                    values = found.pop(each)
                    is_unsigned = name == "intensity" and values.dtype.kind == "u"
                    features[name] = values / np.iinfo(values.dtype).max if is_unsigned else values
        features |= found
        kept = {
            name: values.reshape(len(values), -1)
            for name, values in features.items()
            if (self.features is None or name in (*self.features, "color")) and values.ndim
        }
        arrays = {**kept, "labels": raw_P if raw_P is not None else positions_P3}
        for name, values in arrays.items():
            if len(values) != len(positions_P3):
                raise ValueError(f"it has {len(values)} {name} for {len(positions_P3)} points")
        return _made(positions_P3, kept, raw_P, path)


def _taken(found: dict[str, Any], name: str, single: Sequence[Sequence[str]]) -> Any:
    """Removes and returns three columns, or the array [P, 3] that has them; None if absent."""
    for names in single:
        lower = [each.lower() for each in names]
        if all(each in found for each in lower):
            return np.column_stack([found.pop(each) for each in lower])
    joined = next((each for each in _JOINED[name] if each in found), None)
    return None if joined is None else found.pop(joined)


def _as_color(values_P3: NDArray[Any]) -> FloatArray:
    """Returns colours in [0, 1], of bytes, 16-bit numbers or shares."""
    top = float(values_P3.max(initial=0))
    full = 255.0 if top <= 255 else 65535.0
    is_share = values_P3.dtype.kind == "f" and top <= 1
    return (values_P3 if is_share else values_P3 / full).astype(np.float32)


def _made(positions_P3: NDArray[Any], features: Mapping[str, Any], raw_P: Any, path: Path) -> Scene:
    """Returns the scene of the points whose position is finite."""
    if raw_P is not None:
        raw_P = np.asarray(raw_P).reshape(len(positions_P3), -1)[:, 0]
        if raw_P.dtype.kind == "f" and not (raw_P == np.rint(raw_P)).all():
            raise ValueError("its labels are not whole numbers")
        raw_P = raw_P.astype(np.int64)
    finite_P = np.isfinite(positions_P3).all(axis=1)
    origin_3 = np.zeros(3)
    if positions_P3.dtype != np.float32:
        exact_P3 = positions_P3.astype(np.float64)
        origin_3 = np.floor(exact_P3.min(axis=0, initial=np.inf, where=finite_P[:, None]))
        positions_P3 = exact_P3 - origin_3
    scene = Scene(
        positions_P3.astype(np.float32),
        features={name: values.astype(np.float32) for name, values in features.items()},
        labels_P=raw_P,
        origin_3=origin_3,
    )
    if finite_P.all():
        return scene
    if not finite_P.any():
        raise ValueError("none of its points has a finite position")
    lost = int((~finite_P).sum())
    log_once(f"{path}: {lost} points without a finite position are left out")
    return scene.take(finite_P)
