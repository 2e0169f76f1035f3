"""Scenes of a user's folder, each parsed once into a cache from which its arrays are mapped.

Shapes: S scenes of a split, P points, C channels.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.cache import CacheSettings, parallel_map
from sparsepipe.data.files import (
    UnreadableError,
    digest_values,
    explaining_storage,
    locked,
    new_array,
    require_root,
    scan_files,
)
from sparsepipe.data.points import IntArray, MappedArray, Split
from sparsepipe.data.scenes.formats import READERS, is_scene, members_of
from sparsepipe.data.scenes.reader import SceneReader
from sparsepipe.data.scenes.scene import DERIVED, Scene
from sparsepipe.errors import REMEDY, DataError
from sparsepipe.utils.files import write_plain_json
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.progress import progress

_VERSION = 1
"""Increased with any change to the files of the cache."""
_BYTES_PER_WORKER = 50e6
"""Bytes of scenes that justify starting a process that reads them."""


@dataclass(frozen=True, slots=True)
class StoredScene:
    """A scene in the cache.

    Attributes:
        points: float32 [P, 3 + C], positions and features.
        labels: int32 [P], labels as in the file; None: unknown.
        widths: number of channels of each feature.
        origin: position of the point (0, 0, 0).
        values: the different labels, in ascending order.
        file: path of the user's file or folder.
    """

    points: MappedArray
    labels: MappedArray | None
    widths: Mapping[str, int]
    origin: tuple[float, ...]
    values: tuple[int, ...]
    file: str

    @classmethod
    def found(cls, directory: Path, file: Path) -> StoredScene:
        """Returns the scene that is stored in a directory of the cache."""
        stored = json.loads((directory / "scene.json").read_text())
        labels = MappedArray(directory / "labels.npy") if stored["values"] is not None else None
        return cls(
            MappedArray(directory / "points.npy"),
            labels,
            stored["widths"],
            tuple(stored["origin"]),
            tuple(stored["values"] or ()),
            str(file),
        )

    def raw(self) -> Scene:
        """Returns the scene, whose arrays are mapped, with labels as in the file."""
        features, start, points = dict[str, Any](), 3, self.points.array
        for name, width in self.widths.items():
            features[name] = points[:, start : start + width]
            start += width
        labels_P = None if self.labels is None else self.labels.array
        return Scene(
            points[:, :3],
            features=features,
            labels_P=labels_P,
            origin_3=np.array(self.origin),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneSet:
    """The scenes of a split; ``train`` includes those for validation.

    Attributes:
        scenes: the scenes in the cache.
        reader: turns labels in files into class numbers.
        labels_S: 0 for scenes with labels, else -1.
        held_S: which scenes are for validation.
        groups: what scenes belong to, such as a building.
    """

    scenes: tuple[StoredScene, ...]
    reader: SceneReader
    labels_S: IntArray
    held_S: NDArray[np.bool_]
    groups: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the user's files or folders."""
        return tuple(scene.file for scene in self.scenes)

    def read(self, index: int, rows: NDArray[Any] | None = None) -> Scene:
        """Returns a scene with class numbers as labels; ``rows``: its only points, None: all."""
        scene = self.scenes[index].raw()
        scene = scene if rows is None else scene.take(rows)
        if scene.labels_P is None:
            return scene
        numbers_P = self.reader.class_numbers(scene.labels_P, source=self.scenes[index].file)
        return replace(scene, labels_P=numbers_P)


class SceneFolder:
    """Source: scenes of any format in a folder and the folders in it.

    Args:
        root: the folder.
        reader: reads the scenes.
        cache: settings of the cache.
        split: how scenes are divided. None: folders named train, val and test if there are any,
            else a share of 0.2; a number: that share of groups, drawn always the same, is for
            testing; a path: a csv file with the columns file, relative to ``root``, and split; a
            mapping of ``train``, ``val`` and ``test`` to names of scenes or of folders around them,
            or to the path of a file with these names (without ``train``: all others).
        group: regular expression; scenes in whose path it finds the same text belong together, and
            a share has all of them or none. None: each scene is alone.
    """

    def __init__(
        self,
        root: Path | str | None,
        *,
        reader: SceneReader,
        cache: CacheSettings,
        split: float | str | Mapping[str, Any] | None = None,
        group: str | None = None,
    ) -> None:
        self.root = require_root(
            root,
            what="a folder of scenes",
            where_from=f"scenes are files of {', '.join(READERS)}, or folders with coord.npy",
        )
        self._reader, self._cache = reader, cache
        self._split, self._group = split, group

    @cached_property
    def _names(self) -> Mapping[str, list[str]]:
        """Names of the scenes of each split, relative to the root, with forward slashes."""
        names = scene_names(self.root)
        share = 0.2 if self._split is None else self._split
        found: dict[str, list[str]] = {"train": [], "val": [], "test": []}
        for name in names:
            folders = [each.lower() for each in name.split("/")[:-1]]
            for split, of_split in found.items():
                if split in folders:
                    of_split.append(name)
        if self._split is None and found["train"]:
            return found
        groups = {name: self._group_of(name) for name in names}
        order = sorted({*groups.values()}, key=lambda group: digest_values([0, group]))
        count = min(max(round(float(share) * len(order)), 1), len(order) - 1)  # type: ignore[arg-type]
        tested = {*order[:count]}
        return {
            "train": [name for name in names if groups[name] not in tested],
            "val": [],
            "test": [name for name in names if groups[name] in tested],
        }

    def _group_of(self, name: str) -> str:
        match = re.search(self._group, name) if self._group else None
        return match.group() if match else name

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; without any in the configuration, the numbers from 0."""
        if self._reader.classes:
            return self._reader.classes
        values = {value for scene in self.load("train").scenes for value in scene.values}
        numbers = self._reader.class_numbers(np.array(sorted(values)), source=self.root)
        return tuple(map(str, range(int(numbers.max(initial=-1)) + 1)))

    def load(self, split: Split) -> SceneSet:
        """Returns the scenes of a split, after parsing those that are new."""
        names = [(name, False) for name in self._names[split]]
        if split == "train":
            names += [(name, True) for name in self._names["val"]]
        stored = stored_scenes(self.root, [name for name, _ in names], self._reader, self._cache)
        for scene in stored:
            self._check(scene)
        return SceneSet(
            scenes=stored,
            reader=self._reader,
            labels_S=np.array([0 if scene.labels else -1 for scene in stored], np.int64),
            held_S=np.array([held for _, held in names], bool),
            groups=tuple(self._group_of(name) for name, _ in names),
        )

    def _check(self, scene: StoredScene) -> None:
        self._reader.class_numbers(np.array(scene.values, np.int64), source=scene.file)
        for name in self._reader.features or ():
            if name not in (*DERIVED, *scene.widths):
                raise DataError(
                    f"{scene.file} has no feature {name!r}; it has "
                    f"{', '.join([*DERIVED, *scene.widths])}",
                    remedy="name features that all scenes have in data.features",
                )

    def fingerprint(self) -> str:
        """Returns a hex digest of the scenes of each split, and of what reads them."""
        digests = [
            [name, digest]
            for split in ("train", "val", "test")
            for name, digest in zip(
                self._names[split],
                _digests(self.root, self._names[split], self._cache.directory),
                strict=True,
            )
        ]
        numbers = self._reader.numbers
        return digest_values([digests, None if numbers is None else sorted(numbers.items())])


def scene_names(root: Path) -> list[str]:
    """Returns the paths of all scenes in a folder, relative to it, in order."""
    found = list[str]()
    with explaining_storage(root, setting="data.root"):
        for folder, folders, files in os.walk(root, followlinks=True):
            place = Path(folder)
            inner = {name for name in folders if is_scene(place / name)}
            visible = [name for name in files if name[0] not in "._" and is_scene(Path(name))]
            found += [(place / name).relative_to(root).as_posix() for name in (*inner, *visible)]
            folders[:] = [name for name in folders if name[0] not in "._" and name not in inner]
    if not found:
        raise DataError(
            f"{root} has no scenes",
            remedy=f"set data.root to a folder with files of {', '.join(READERS)}",
        )
    return sorted(found)


def _digests(root: Path, names: Sequence[str], cache_directory: Path) -> list[str]:
    """Returns a digest of the files of each scene."""
    members = [
        [path.relative_to(root).as_posix() for path in members_of(root / name)] for name in names
    ]
    flat = [member for each in members for member in each]
    scanned = {
        file.name: file.digest for file in scan_files(root, flat, cache_directory=cache_directory)
    }
    return [digest_values([[Path(m).name, scanned[m]] for m in each]) for each in members]


def stored_scenes(
    root: Path, names: Sequence[str], reader: SceneReader, settings: CacheSettings
) -> tuple[StoredScene, ...]:
    """Returns scenes from the cache, after parsing those that it lacks.

    Raises:
        DataError: some files are not valid; the others are in the cache nevertheless.
    """
    base = settings.directory / "scenes"
    own = [_VERSION, reader.features, reader.columns, reader.label]
    places = [
        (root / name, base / digest_values([*own, digest]))
        for name, digest in zip(names, _digests(root, names, settings.directory), strict=True)
    ]
    with explaining_storage(base, setting="data.cache_dir"):
        missing = [place for place in places if not (place[1] / "scene.json").is_file()]
        if missing:
            with locked(base / "lock", wait_s=settings.lock_wait_s):
                _store_all(missing, reader, settings.workers or usable_cores())
    return tuple(StoredScene.found(directory, path) for path, directory in places)


def _store_all(places: Sequence[tuple[Path, Path]], reader: SceneReader, workers: int) -> None:
    size = sum(member.stat().st_size for path, _ in places for member in members_of(path))
    faults = list[str]()
    with (
        progress("reading scenes") as advance,
        parallel_map(min(workers, int(size / _BYTES_PER_WORKER)), chunk=1) as mapped,
    ):
        for fault in mapped(partial(_store, reader), places):
            faults += [fault] if fault else []
            advance(len(places))
    if faults:
        shown = [fault.partition(REMEDY) for fault in faults[:10]]
        raise DataError(
            f"{len(faults)} of {len(places)} scenes cannot be read:\n"
            + "\n".join(f"  {fault}" for fault, *_ in shown),
            remedy="; ".join(dict.fromkeys(remedy for *_, remedy in shown)),
        )


def _store(reader: SceneReader, place: tuple[Path, Path]) -> str | None:
    """Parses a scene into its directory of the cache, or returns its fault and remedy."""
    path, directory = place
    if (directory / "scene.json").is_file():
        return None
    try:
        scene = reader.read_raw(path)
    except UnreadableError:
        raise
    except DataError as error:
        return str(error)
    points_PC = np.concatenate([scene.coords_P3, *scene.features.values()], axis=1)
    arrays = {"points": points_PC}
    if scene.labels_P is not None:
        arrays["labels"] = scene.labels_P.astype(np.int32)
    for name, values in arrays.items():
        with new_array(
            directory / f"{name}.npy", dtype=values.dtype, shape=values.shape
        ) as written:
            written[...] = values
    write_plain_json(
        directory / "scene.json",
        {
            "widths": {name: each.shape[1] for name, each in scene.features.items()},
            "origin": scene.origin_3.tolist(),
            "values": None if scene.labels_P is None else np.unique(scene.labels_P).tolist(),
        },
    )
    return None
