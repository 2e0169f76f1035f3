"""Reading scenes: which columns of a file are positions, features and labels.

Shapes: P points, C channels, K classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import explaining_file, log_once
from sparsepipe.data.listing import named
from sparsepipe.data.points import ExactArray, IntArray
from sparsepipe.data.scenes.formats import READERS, Columns, is_scene, read_columns
from sparsepipe.data.scenes.scene import DERIVED, IGNORED, WIDTHS, Scene
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.files import expanded
from sparsepipe.utils.reading import explained, parse_yaml, read_text

Value = int | str
"""A label as in a file: a number or, where objects of a scene are named, a name."""
_ALIASES = {
    "coord": "coord coords x,y,z points point xyz pos positions",
    "color": "color colors red,green,blue r,g,b diffuse_red,diffuse_green,diffuse_blue rgb",
    "normal": "normal normals nx,ny,nz normal_x,normal_y,normal_z",
    "intensity": "intensity strength reflectance remission scalar_intensity",
    "return_number": "return_number scalar_return_number scalar_returnnumber",
    "label": "label labels segment segment20 class classification semantic semantic_label "
    "sem_label seg_label scalar_label scalar_classification",
}
"""Names of columns, in lower case, the first found counts; commas join columns of one feature."""


_FARTHEST = 1e9
"""Largest coordinate in metres; files mark missing points with larger ones."""


class ParsedScene(NamedTuple):
    """A scene as it stands in its file.

    Attributes:
        scene: its points with a finite position; ``labels_P`` are places of labels in ``values``.
        values: the different labels that stand there.
        positions_Q3: float64 [Q, 3], the positions of all points of the file.
        kept_Q: which of these points are in the scene.
    """

    scene: Scene
    values: tuple[Value, ...]
    positions_Q3: ExactArray
    kept_Q: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneReader:
    """Reads scenes of all formats, with the same features and labels.

    Args:
        features: names of the features to keep, besides the colour; None: all.
        columns: names of the columns of files that do not name them.
        label: name of the column of labels; None: the first that is usual for it.
        classes: names of the classes; None: those of the learning map, if it has any.
        ignore: labels in files that do not count, besides negative ones.
        learning_map: class number of each label in files, negative where it does not count; or, for
            each class, its labels in files; or the path of a YAML file with such a mapping, also in
            the layout of ``semantic-kitti.yaml``. None: labels are class numbers, or names of
            ``classes``.

    Raises:
        ConfigError: the learning map is not valid, or has classes that ``classes`` does not name.
    """

    features: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    label: str | None = None
    classes: Sequence[str] | None = None
    ignore: Value | Sequence[Value] | None = None
    learning_map: Mapping[Value, int] | Sequence[Any] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.learning_map, str):
            path = expanded(self.learning_map)
            remedy = "set data.learning_map to a YAML file with a class number for each label"
            with explained(path, "learning map", error=ConfigError, remedy=remedy):
                names, numbers = _learning_map(parse_yaml(read_text(path)))
            object.__setattr__(self, "classes", self.classes or names)
        elif isinstance(self.learning_map, Mapping | None):
            numbers = self.learning_map or {}
        else:
            listed = [[each] if isinstance(each, Value) else each for each in self.learning_map]
            pairs = [(value, number) for number, each in enumerate(listed) for value in each]
            numbers = dict(pairs)
            if len(numbers) < len(pairs):
                raise ConfigError(
                    "data.learning_map has a label of two classes",
                    remedy="give each label one class",
                )
        # Keys are text in JSON.
        whole = {int(n) if str(n).lstrip("-").isdecimal() else n: numbers[n] for n in numbers}
        object.__setattr__(self, "learning_map", whole or None)
        if self.classes and max(whole.values(), default=0) >= len(self.classes):
            raise ConfigError(
                f"data.learning_map has the class {max(whole.values())}, but data.classes names "
                f"{len(self.classes)} classes, from 0",
                remedy="name all classes, or correct the map",
            )

    def __call__(self, path: Path) -> Scene:
        """Returns the scene of a file or folder, with class numbers as labels.

        Raises:
            DataError: it is missing or not valid, lacks a feature, or has labels of no class.
        """
        found = self.parse(path)
        if found.scene.labels_P is None:
            return found.scene
        numbers_V = self.class_numbers(found.values, source=path)
        return replace(found.scene, labels_P=numbers_V[found.scene.labels_P])

    def parse(self, path: Path) -> ParsedScene:
        """Returns the scene of a file or folder, and what stands there."""
        if not is_scene(path):
            raise DataError(
                f"{path} {'is not a scene' if path.exists() else 'does not exist'}",
                remedy=f"give a file of {', '.join(READERS)}, or the folder of a scene",
            )
        remedy = "restore it, leave it out, or correct data.columns, data.label or data.features"
        with (
            explaining_file(path, what="is not a valid scene", extra="scenes", remedy=remedy),
            np.errstate(all="ignore"),  # values that are not finite are refused
        ):
            return self.scene_of(read_columns(path, names=self.columns or ()), source=path)

    def class_numbers(self, values: Sequence[Value], *, source: object) -> IntArray:
        """Returns the class number of each label in files, -100 for those that do not count.

        Raises:
            DataError: some labels are not of a class; the message begins with ``source``.
        """
        ignored = [self.ignore] if isinstance(self.ignore, Value) else self.ignore or ()
        classes, numbers = list(self.classes or ()), dict[Value, int]()
        most = np.inf if self.classes is None else len(classes)
        for value in values:
            if value in ignored:
                numbers[value] = IGNORED
            elif isinstance(self.learning_map, Mapping) and value in self.learning_map:
                numbers[value] = self.learning_map[value]
            elif isinstance(value, int) and value < 0:
                numbers[value] = IGNORED
            elif value in classes:
                numbers[value] = classes.index(str(value))
            elif isinstance(value, int) and self.learning_map is None and value < most:
                numbers[value] = value
        if unknown := [str(value) for value in values if value not in numbers]:
            raise DataError(
                f"{source} has labels of no class: {named(unknown)}",
                remedy="name all classes in data.classes, in the order of the labels from 0; set "
                "data.ignore to labels that do not count; or map labels in data.learning_map",
            )
        numbers_V = np.array([numbers[value] for value in values], np.int64)
        return np.where(numbers_V < 0, IGNORED, numbers_V)

    def file_labels(self, num_classes: int) -> list[Value]:
        """Returns the label in files that stands for each class, the first if several do."""
        numbers = self.learning_map if isinstance(self.learning_map, Mapping) else {}
        first = {number: value for value, number in reversed([*numbers.items()])}
        return [first.get(number, number) for number in range(num_classes)]

    def scene_of(self, columns: Columns, *, source: object) -> ParsedScene:
        """Returns the scene of columns as :meth:`parse` does; raises a ValueError."""
        found = _joined(columns, label=self.label)
        given_Q3, raw_Q = found.pop("coord", np.empty(0)), found.pop("label", None)
        if given_Q3.shape[1:] != (3,) or not len(given_Q3) or given_Q3.dtype.kind not in "iuf":
            has = ", ".join(columns) or "none"
            raise ValueError(f"it has no points with x, y and z; its columns are {has}")
        wanted = {*(self.features or found)}.difference(DERIVED)
        features = dict[str, NDArray[Any]]()
        for name in [n for n in found if n in {*wanted, "color"}]:
            values = found[name].reshape(len(found[name]), -1) if found[name].ndim else found[name]
            is_used = name in wanted or np.isfinite(values).all()
            if values.shape == (len(given_Q3), WIDTHS.get(name, 1)) and is_used:
                features[name] = values.astype(np.float32)
        if self.features is not None and (lacking := sorted(wanted - features.keys())):
            has = ", ".join([*DERIVED, *features])
            raise ValueError(f"it has no {lacking[0]} at each point; its features are {has}")
        positions_Q3 = np.asarray(given_Q3, np.float64)
        kept_Q = np.isfinite(positions_Q3.sum(axis=1))
        if not kept_Q.any() or (raw_Q is not None and raw_Q.size != len(kept_Q)):
            labels = "no" if raw_Q is None else raw_Q.size
            raise ValueError(f"it has {kept_Q.sum()} finite positions, but {labels} labels")
        if not kept_Q.all():
            log_once(f"{source}: {(~kept_Q).sum()} points are left out, whose positions are NaN")
        if (farthest := np.abs(positions_Q3[kept_Q]).max()) > _FARTHEST:
            raise ValueError(f"it has a point at {farthest:g} m, which is no place in a scene")
        origin_3 = np.zeros(3)
        if given_Q3.dtype != np.float32:  # positions on maps need more digits than float32 has
            origin_3 = np.floor(positions_Q3[kept_Q].min(axis=0))
        labels_Q = None if raw_Q is None else raw_Q.reshape(len(kept_Q))
        coords_Q3 = (positions_Q3 - origin_3).astype(np.float32)
        scene = Scene(coords_Q3, features=features, labels_P=labels_Q, origin_3=origin_3)
        scene = scene.take(kept_Q)
        if broken := [n for n, v in scene.features.items() if not np.isfinite(v).all()]:
            raise ValueError(f"its {broken[0]} is not finite at all points")
        if scene.labels_P is None:
            return ParsedScene(scene, (), positions_Q3, kept_Q)
        values_V, places_P = np.unique(scene.labels_P, return_inverse=True)
        if values_V.dtype.kind == "f":
            if not (values_V == np.rint(values_V)).all():
                raise ValueError("its labels are not whole numbers")
            values_V = values_V.astype(np.int64)
        scene = replace(scene, labels_P=places_P)
        return ParsedScene(scene, tuple(values_V.tolist()), positions_Q3, kept_Q)


def _joined(columns: Columns, *, label: str | None) -> dict[str, NDArray[Any]]:
    """Returns columns under the names of features, ``coord`` and ``label``, in lower case."""
    found = {name.lower(): np.asarray(values) for name, values in columns.items()}
    taken = dict[str, NDArray[Any]]()
    for name, names in _ALIASES.items():
        options = [label.lower()] if label and name == "label" else names.split()
        for parts in [option.split(",") for option in options]:
            if name not in taken and {*parts} <= found.keys():
                arrays = [found.pop(part) for part in parts]
                taken[name] = arrays[0] if len(arrays) == 1 else np.column_stack(arrays)
    if "color" in taken:
        taken["color"] = _color(taken["color"])
    if "intensity" in taken and taken["intensity"].dtype in (np.uint8, np.uint16):
        taken["intensity"] = taken["intensity"] / np.iinfo(taken["intensity"].dtype).max
    return {**{name: each for name, each in found.items() if name != "label"}, **taken}


def read_scene(path: str | os.PathLike[str], **settings: Any) -> Scene:
    """Returns the scene of a file or folder; ``settings`` are those of :class:`SceneReader`.

    Raises:
        DataError: it is missing or not valid, or has labels of no class.
    """
    return SceneReader(**settings)(expanded(path))


def _learning_map(tree: Any) -> tuple[tuple[str, ...], Mapping[Value, int]]:
    """Returns names of classes and the class number of each label, of a YAML file's content.

    In the layout of ``semantic-kitti.yaml``, classes that ``learning_ignore`` names do not count,
    and the others are numbered from 0.
    """
    is_kitti = isinstance(tree, Mapping) and "learning_map" in tree
    numbers = tree["learning_map"] if is_kitti else tree
    if not isinstance(numbers, Mapping) or not all(isinstance(n, int) for n in numbers.values()):
        raise ValueError("it is not a mapping of labels to class numbers")
    if not is_kitti:
        return (), numbers
    ignored = {number for number, is_so in tree.get("learning_ignore", {}).items() if is_so}
    order = sorted({*numbers.values()} - ignored)
    places = {number: place for place, number in enumerate(order)}
    labels, inverse = tree.get("labels", {}), tree.get("learning_map_inv", {})
    names = tuple(str(labels.get(inverse.get(number), number)) for number in order)
    return names, {value: places.get(number, IGNORED) for value, number in numbers.items()}


def _color(values: NDArray[Any]) -> NDArray[Any]:
    """Returns colours in [0, 1], of shares, bytes or 16-bit numbers."""
    top = np.nanmax(values, initial=0)
    if values.dtype.kind == "f" and top <= 1:
        return values
    return values / (255 if top <= 255 else 65535)
