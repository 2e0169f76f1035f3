"""Reading scenes: which columns of a file are positions, features and labels.

Shapes: P points, C channels, K classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, log_once, unreadable
from sparsepipe.data.points import ExactArray, IntArray
from sparsepipe.data.scenes.formats import READERS, Columns, is_scene_folder, read_columns
from sparsepipe.data.scenes.scene import IGNORED, Scene
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneReader:
    """Reads scenes of all formats, with the same features and labels.

    Attributes:
        features: names of the features to keep, besides the colour; None: all.
        columns: names of the columns of files that do not name them.
        label: name of the column of labels; None: the first that is ``label`` or usual for it.
        classes: names of the classes; empty: unknown.
        numbers: class number of each label in files, -100 where it does not count; None: labels
            are class numbers, or names of ``classes``.
        ignored: labels in files that do not count, besides negative ones.
    """

    features: tuple[str, ...] | None = None
    columns: tuple[str, ...] = ()
    label: str | None = None
    classes: tuple[str, ...] = ()
    numbers: Mapping[Value, int] | None = None
    ignored: tuple[Value, ...] = ()

    def __call__(self, path: Path) -> Scene:
        """Returns the scene of a file or folder, with class numbers as labels.

        Raises:
            DataError: it is missing or not valid, or has labels that are not of a class.
        """
        scene, values = self.parse(path)
        if scene.labels_P is None:
            return scene
        return replace(scene, labels_P=self.class_numbers(values, source=path)[scene.labels_P])

    def parse(self, path: Path) -> tuple[Scene, tuple[Value, ...]]:
        """Returns the scene of a file or folder, and the different labels that stand there.

        The ``labels_P`` of the scene are places of labels among these.
        """
        if not (path.suffix.lower() in READERS and path.exists()) and not is_scene_folder(path):
            raise DataError(
                f"{path} is not a scene" if path.exists() else f"{path} does not exist",
                remedy=f"give a file of {', '.join(READERS)}, or the folder of a scene",
            )
        try:
            if not is_scene_folder(path):
                check_regular(path)
            with np.errstate(all="ignore"):  # values that are not finite are refused
                return self.scene_of(read_columns(path, names=self.columns), source=path)
        except (DataError, MemoryError):
            raise
        except ImportError as error:
            raise DataError(
                f"{path} needs the package {error.name}",
                remedy="run pip install 'sparsepipe[scenes]'",
            ) from error
        except Exception as error:  # each format's reader raises its own types
            if isinstance(error, OSError) and error.errno:
                raise unreadable(path, error) from error
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(
                f"{path} holds no scene that can be read: {why}",
                remedy="restore it, leave it out, or correct data.columns or data.label",
            ) from error

    def class_numbers(self, values: Sequence[Value], *, source: object) -> IntArray:
        """Returns the class number of each label in files, -100 for those that do not count.

        Raises:
            DataError: some labels are not of a class; the message begins with ``source``.
        """
        known, unknown = list[int](), list[Value]()
        for value in values:
            number = None if self.numbers is None else self.numbers.get(value)
            if value in self.ignored or (isinstance(value, int) and value < 0):
                number = IGNORED
            elif isinstance(value, str) and value in self.classes:
                number = self.classes.index(value)
            elif isinstance(value, int) and self.numbers is None:
                number = value if value < (len(self.classes) or np.inf) else None
            known.append(IGNORED if number is None else number)
            unknown += [value] if number is None else []
        if unknown:
            more = ", ..." if len(unknown) > 10 else ""
            raise DataError(
                f"{source} has labels of no class: {', '.join(map(str, unknown[:10]))}{more}",
                remedy="name all classes in data.classes, in the order of the labels from 0; set "
                "data.ignore to labels that do not count; or map labels in data.learning_map",
            )
        return np.array(known, np.int64)

    def file_labels(self, num_classes: int) -> list[Value]:
        """Returns the label in files that stands for each class, the lowest if several do."""
        if self.numbers is None:
            return list(range(num_classes))
        numbers = sorted(self.numbers.items(), key=lambda item: str(item[0]).zfill(20))
        first = {number: value for value, number in reversed(numbers)}
        return [first.get(number, number) for number in range(num_classes)]

    def positions(self, path: Path) -> ExactArray:
        """Returns the positions of all points of a file or folder that :meth:`parse` can read, also
        those that are not finite, float64 [Q, 3].
        """
        columns = read_columns(path, names=self.columns)
        return np.asarray(_joined(columns, label=self.label)["coord"], np.float64)

    def scene_of(self, columns: Columns, *, source: object) -> tuple[Scene, tuple[Value, ...]]:
        """Returns the scene of columns as :meth:`parse` does; raises a ValueError."""
        found = _joined(columns, label=self.label)
        exact_P3, raw_P = found.pop("coord", np.empty(0)), found.pop("label", None)
        if exact_P3.shape[1:] != (3,) or not len(exact_P3) or exact_P3.dtype.kind not in "iuf":
            raise ValueError(
                f"it has no points with x, y and z, but {', '.join(columns) or 'nothing'}"
            )
        if self.features is None:
            features = {n: v for n, v in found.items() if v.shape[:1] == exact_P3.shape[:1]}
        else:
            features = {n: v for n, v in found.items() if n in (*self.features, "color")}
        for name, values in (*features.items(), ("label", exact_P3 if raw_P is None else raw_P)):
            if len(values) != len(exact_P3):
                raise ValueError(f"it has {len(exact_P3)} points, but {len(values)} of {name}")
        finite_P = np.isfinite(exact_P3).all(axis=1)
        if not finite_P.all():
            log_once(f"{source}: {(~finite_P).sum()} points are left out, whose positions are NaN")
        origin_3 = np.zeros(3)
        if exact_P3.dtype != np.float32:  # positions on maps need more digits than float32 has
            origin_3 = np.floor(exact_P3[finite_P].min(axis=0).astype(np.float64))
            exact_P3 = exact_P3 - origin_3
        scene = Scene(
            exact_P3.astype(np.float32),
            features={n: v.reshape(len(v), -1).astype(np.float32) for n, v in features.items()},
            labels_P=None if raw_P is None else raw_P.reshape(len(raw_P)),
            origin_3=origin_3,
        ).take(finite_P)
        if broken := [n for n, v in scene.features.items() if not np.isfinite(v).all()]:
            raise ValueError(f"its {broken[0]} is not finite at all points")
        return _with_places(scene)


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
    if "intensity" in taken and taken["intensity"].dtype.kind == "u":
        taken["intensity"] = taken["intensity"] / np.iinfo(taken["intensity"].dtype).max
    return {**{name: each for name, each in found.items() if name != "label"}, **taken}


def scene_reader(
    *,
    features: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    label: str | None = None,
    classes: Sequence[str] | None = None,
    ignore: Value | Sequence[Value] | None = None,
    learning_map: Mapping[Value, int] | str | None = None,
) -> SceneReader:
    """Returns a reader; see ``SceneDataModule`` for its arguments.

    Raises:
        ConfigError: the file of the learning map is not valid.
    """
    names = tuple(map(str, classes or ()))
    if isinstance(learning_map, str):
        path = expanded(learning_map)
        remedy = "set data.learning_map to a YAML file with a class number for each label"
        with explained(path, "learning map", error=ConfigError, remedy=remedy):
            found, learning_map = _learning_map(parse_yaml(read_text(path)))
            names = names or found
    ignored = [ignore] if isinstance(ignore, Value) else ignore or ()
    return SceneReader(
        features=None if features is None else tuple(features),
        columns=tuple(map(str, columns or ())),
        label=label,
        classes=names,
        numbers=learning_map
        and {value: number if number >= 0 else IGNORED for value, number in learning_map.items()},
        ignored=tuple(ignored),
    )


def read_scene(path: str | os.PathLike[str], **settings: Any) -> Scene:
    """Returns the scene of a file or folder; ``settings`` are those of :func:`scene_reader`.

    Raises:
        DataError: it is missing or not valid, or has labels that are not of a class.
    """
    return scene_reader(**settings)(expanded(path))


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
    top = values.max(initial=0)
    if values.dtype.kind == "f" and top <= 1:
        return values
    return values / (255 if top <= 255 else 65535)


def _with_places(scene: Scene) -> tuple[Scene, tuple[Value, ...]]:
    """Returns a scene whose labels are places among its different labels, and these."""
    if scene.labels_P is None:
        return scene, ()
    values, places_P = np.unique(scene.labels_P, return_inverse=True)
    if values.dtype.kind == "f" and not (values == np.rint(values)).all():
        raise ValueError("its labels are not whole numbers")
    whole = values.astype(np.int64) if values.dtype.kind in "biuf" else values
    return replace(scene, labels_P=places_P), tuple(whole.tolist())
