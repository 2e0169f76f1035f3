"""Scenes of a user's folder, each parsed once into a cache from which its arrays are mapped.

Shapes: S scenes of a split, P points, C channels.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

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
from sparsepipe.data.listing import named, read_table
from sparsepipe.data.points import IntArray, MappedArray, Split
from sparsepipe.data.scenes.formats import READERS, is_scene_folder, members_of
from sparsepipe.data.scenes.reader import SceneReader, Value
from sparsepipe.data.scenes.scene import DERIVED, WIDTHS, Scene
from sparsepipe.errors import REMEDY, ConfigError, DataError
from sparsepipe.utils.files import expanded, write_plain_json
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.progress import progress
from sparsepipe.utils.reading import explained, parse_json, read_text

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")
_RECORD = "scene.json"
"""Name of the file of a stored scene that is written last."""
_VERSION = 2
"""Increased with any change to the files of the cache."""
_BYTES_PER_WORKER = 50e6
"""Bytes of scenes that justify starting a process that reads them."""
_SHARE = 0.2
"""Share for testing where nothing divides the scenes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredScene:
    """A scene in the cache.

    Attributes:
        directory: has ``points.npy``, float32 [P, 3 + C], positions and features, and
            ``labels.npy`` [P], places among ``values``, if the scene has labels.
        file: path of the user's file or folder.
        widths: number of channels of each feature.
        origin: position of the point (0, 0, 0).
        values: the different labels, as in the file; None: unknown.
    """

    directory: Path
    file: str
    widths: Mapping[str, int]
    origin: Sequence[float]
    values: Sequence[Value] | None

    def read(self, reader: SceneReader) -> Scene:
        """Returns the scene, whose points are mapped, with class numbers as labels."""
        points = MappedArray(self.directory / "points.npy").array
        ends = np.cumsum([3, *self.widths.values()])[:-1]
        coords_P3, *features = np.split(points, ends, axis=1)
        labels_P = None
        if self.values is not None:
            numbers = reader.class_numbers(self.values, source=self.file)
            labels_P = numbers[MappedArray(self.directory / "labels.npy").array]
        return Scene(
            coords_P3,
            features=dict(zip(self.widths, features, strict=True)),
            labels_P=labels_P,
            origin_3=np.array(self.origin),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneSet:
    """The scenes of a split, of which ``train`` includes those for validation.

    Attributes:
        scenes: the scenes in the cache.
        reader: turns labels in files into class numbers.
        labels_S: 0 for scenes with labels, else -1.
        groups: what each scene belongs to, such as a building.
        held_S: which scenes are for validation.
    """

    scenes: Sequence[StoredScene]
    reader: SceneReader
    labels_S: IntArray
    groups: Sequence[str]
    held_S: NDArray[np.bool_]

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the user's files or folders."""
        return tuple(scene.file for scene in self.scenes)

    def read(self, index: int) -> Scene:
        """Returns a scene, whose points are mapped, with class numbers as labels."""
        return self.scenes[index].read(self.reader)


class SceneFolder:
    """Source: scenes of any format in a folder and in the folders within it.

    Args:
        root: the folder.
        reader: reads the scenes.
        cache: settings of the cache.
        split: what divides the scenes. None: folders named train, val and test if there are any,
            else the share 0.2; a number: the share of groups for testing, drawn always the same; a
            path: a csv file with the columns file, relative to ``root``, and split; or a mapping of
            ``train``, ``val`` and ``test`` to names, or to the path of a file with names, of scenes
            or of folders around them. Without ``train`` there, all others are for training.
        group: regular expression. Scenes in whose paths it finds the same text belong together: a
            share has all of them or none. None: each scene is a group.
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
        where_from = f"scenes are files of {', '.join(READERS)}, or folders of one scene each"
        self.root = require_root(root, what="a folder of scenes", where_from=where_from)
        self._reader, self._cache, self._split, self._group = reader, cache, split, group

    @cached_property
    def _names(self) -> Mapping[Part, Sequence[str]]:
        """Paths of the scenes of each part, relative to the root, with forward slashes."""
        names, split = scene_names(self.root), self._split
        if isinstance(split, str):
            given = expanded(split)
            path = given if given.exists() else self.root / given
            rows = read_table(path, columns=("file", "split"), splits=PARTS)
            split = {part: [row["file"] for row in rows if row["split"] == part] for part in PARTS}
        if isinstance(split, Mapping):
            found = _by_names(self.root, names, split)
        else:
            found = {
                part: [n for n in names if part in n.lower().split("/")[:-1]] for part in PARTS
            }
            if split is not None or not found["train"]:
                groups = {name: self._group_of(name) for name in names}
                tested = _share(groups.values(), _SHARE if split is None else split)
                test = [name for name in names if groups[name] in tested]
                found = {"train": [n for n in names if n not in {*test}], "val": [], "test": test}
        if not found["test"]:
            found = {**found, "test": found["val"], "val": []}
        if not found["train"]:
            raise DataError(
                f"{self.root} has {len(names)} scenes, but none for training",
                remedy="correct data.split",
            )
        return found

    def _group_of(self, name: str) -> str:
        match = re.search(self._group, name) if self._group else None
        return match.group() if match else name

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; if neither settings nor a learning map have any, numbers."""
        if self._reader.classes:
            return self._reader.classes
        values = {value for scene in self.load("train").scenes for value in scene.values or ()}
        numbers = self._reader.class_numbers(sorted(values, key=str), source=self.root)
        return tuple(map(str, range(int(numbers.max(initial=-1)) + 1)))

    def load(self, split: Split) -> SceneSet:
        """Returns the scenes of a split, after parsing those that are new.

        Raises:
            DataError: scenes are not valid, have labels of no class or, for training, none, or lack
                a feature; the valid ones are in the cache nevertheless.
        """
        held = list(self._names["val"]) if split == "train" else []
        names = [*self._names[split], *held]
        scenes = stored_scenes(self.root, names, reader=self._reader, cache=self._cache)
        for scene in scenes:
            self._check(scene, needs_labels=split == "train")
        return SceneSet(
            scenes=scenes,
            reader=self._reader,
            labels_S=np.array([0 if scene.values else -1 for scene in scenes], np.int64),
            groups=[self._group_of(name) for name in names],
            held_S=np.arange(len(names)) >= len(names) - len(held),
        )

    def _check(self, scene: StoredScene, *, needs_labels: bool) -> None:
        self._reader.class_numbers(scene.values or (), source=scene.file)
        if needs_labels and scene.values is None:
            raise DataError(
                f"{scene.file} is for training, but its points have no labels",
                remedy="set data.label to the name of their column, or data.split to leave it out",
            )
        for name in self._reader.features or ():
            width = scene.widths.get(name)
            if width not in (WIDTHS.get(name, 1), None) or (width is None and name not in DERIVED):
                what = "no feature" if width is None else f"{width} channels of"
                has = ", ".join([*DERIVED, *scene.widths])
                raise DataError(
                    f"{scene.file} has {what} {name!r}; its features are {has}",
                    remedy="name features that all scenes have in data.features",
                )

    def fingerprint(self) -> str:
        """Returns a hex digest of the scenes of each part, and of what maps their labels."""
        digests = [
            [part, name, digest]
            for part, names in self._names.items()
            for name, digest in zip(names, _digests(self.root, names, self._cache), strict=True)
        ]
        numbers = self._reader.numbers or {}
        return digest_values([digests, self._reader.classes, [*map(list, numbers.items())]])


def scene_names(root: Path) -> list[str]:
    """Returns the paths of all scenes in a folder, relative to it, in order.

    Names that begin with ``.`` or ``_`` are left out.
    """
    found = list[Path]()
    with explaining_storage(root, setting="data.root"):
        for place, folders, files in os.walk(root, followlinks=True):
            folders[:] = [name for name in folders if name[0] not in "._"]
            scenes = [name for name in folders if is_scene_folder(Path(place, name))]
            scenes += [n for n in files if n[0] not in "._" and Path(n).suffix.lower() in READERS]
            found += [Path(place, name) for name in scenes]
            folders[:] = [name for name in folders if name not in scenes]
    if not found:
        raise DataError(
            f"{root} has no scenes",
            remedy=f"set data.root to a folder with files of {', '.join(READERS)}",
        )
    return sorted(path.relative_to(root).as_posix() for path in found)


def _share(groups: Iterable[str], share: Any) -> set[str]:
    """Returns the groups for testing: a share of them, at least one, but never all."""
    if isinstance(share, bool) or not isinstance(share, float | int) or not 0 < share < 1:
        raise ConfigError(
            f"data.split={share} is not a share in (0, 1), a csv file or a mapping of names",
            remedy="set it to one of these, such as 0.2 or {train:[Area_1],test:[Area_5]}",
        )
    order = sorted({*groups}, key=lambda group: digest_values([0, group]))
    return {*order[: min(max(round(share * len(order)), 1), len(order) - 1)]}


def _by_names(root: Path, names: Sequence[str], split: Mapping[str, Any]) -> dict[Part, list[str]]:
    """Divides scenes by their names or those of folders around them; see ``SceneFolder``."""
    known = {name: {name} for name in names}
    for name in names:
        parts = [*Path(name).parent.parts, Path(name).stem]
        for n in range(len(parts)):
            for key in (parts[n], "/".join(parts[n:]), "/".join(parts[: n + 1])):
                known.setdefault(key, set()).add(name)
    found = {part: set[str]() for part in split}
    for part, given in split.items():
        listed = _listed(root, given) if isinstance(given, str) else [str(each) for each in given]
        # A list's names may begin with folders above the root.
        tails = [
            ["/".join(each.split("/")[n:]) for n in range(each.count("/") + 1)] for each in listed
        ]
        keys = [next((key for key in each if key in known), None) for each in tails]
        if absent := [name for name, key in zip(listed, keys, strict=True) if key is None]:
            raise DataError(
                f"data.split names scenes for {part} that are not in {root}: {named(absent)}",
                remedy="correct the names, which are those of scenes or of folders around them",
            )
        found[part] = {name for key in keys if key for name in known[key]}
    found.setdefault("train", {*names}.difference(*found.values()))
    if odd := {*found} - {*PARTS} or [n for n in names if sum(n in f for f in found.values()) > 1]:
        raise ConfigError(
            f"data.split has {sorted(odd)[0]!r}, which is in two parts or is not a part",
            remedy="give train, val and test names of different scenes or folders",
        )
    return {part: sorted(found.get(part, ())) for part in PARTS}


def _listed(root: Path, setting: str) -> list[str]:
    """Returns the names in a file: a JSON list, or a name on each line."""
    path = expanded(setting) if expanded(setting).exists() else root / setting
    remedy = "give a list of names, or the path of a text or JSON file with names"
    with explained(path, "list of scenes", error=DataError, remedy=remedy):
        text = read_text(path)
        names = parse_json(text) if path.suffix.lower() == ".json" else text.split("\n")
        return [str(name).strip() for name in names if str(name).strip()]


def _digests(root: Path, names: Sequence[str], cache: CacheSettings) -> list[str]:
    """Returns a digest of the files of each scene."""
    members = [[str(path.relative_to(root)) for path in members_of(root / name)] for name in names]
    flat = [member for each in members for member in each]
    scanned = scan_files(root, flat, cache_directory=cache.directory)
    of = {file.name: [Path(file.name).name, file.digest] for file in scanned}
    return [digest_values([of[member] for member in each]) for each in members]


def stored_scenes(
    root: Path, names: Sequence[str], *, reader: SceneReader, cache: CacheSettings
) -> list[StoredScene]:
    """Returns scenes from the cache, after parsing those that it lacks.

    Raises:
        DataError: some files are not valid; the others are in the cache nevertheless.
    """
    base, own = (
        cache.directory / "scenes",
        [_VERSION, reader.features, reader.columns, reader.label],
    )
    digests = zip(names, _digests(root, names, cache), strict=True)
    places = [(root / name, base / digest_values([*own, digest])) for name, digest in digests]
    with explaining_storage(base, setting="data.cache_dir"):
        if not all((directory / _RECORD).is_file() for _, directory in places):
            with locked(base / "lock", wait_s=cache.lock_wait_s):
                new = [place for place in places if not (place[1] / _RECORD).is_file()]
                _store_all(new, reader, cache.workers or usable_cores())
        return [
            StoredScene(directory=directory, file=str(path), **json.loads(text))
            for path, directory in places
            for text in [(directory / _RECORD).read_text()]
        ]


def _store_all(places: Sequence[tuple[Path, Path]], reader: SceneReader, workers: int) -> None:
    size = sum(member.stat().st_size for path, _ in places for member in members_of(path))
    faults = list[list[str]]()
    with (
        progress("reading scenes") as advance,
        parallel_map(min(workers, int(size / _BYTES_PER_WORKER)), chunk=1) as mapped,
    ):
        for fault in mapped(partial(_store, reader), places):
            faults += [fault.split(REMEDY)] if fault else []
            advance(len(places))
    if faults:
        what, more = "\n  ".join(fault for fault, _ in faults[:10]), len(faults[10:])
        raise DataError(
            f"scenes cannot be read:\n  {what}" + (f"\n  and {more} more" if more else ""),
            remedy="; ".join(dict.fromkeys(remedy for _, remedy in faults[:10])),
        )


def _store(reader: SceneReader, place: tuple[Path, Path]) -> str | None:
    """Parses a scene into its directory of the cache, or returns its fault and remedy."""
    path, directory = place
    try:
        scene, values = reader.parse(path)
    except UnreadableError:
        raise
    except DataError as error:
        return str(error)
    arrays = {"points": np.concatenate([scene.coords_P3, *scene.features.values()], axis=1)}
    if scene.labels_P is not None:
        arrays["labels"] = scene.labels_P.astype(np.min_scalar_type(len(values)))
    for name, array in arrays.items():
        file = directory / f"{name}.npy"
        with new_array(file, dtype=array.dtype, shape=array.shape) as stored:
            stored[...] = array
    record = {
        "widths": {name: each.shape[1] for name, each in scene.features.items()},
        "origin": scene.origin_3.tolist(),
        "values": None if scene.labels_P is None else values,
    }
    write_plain_json(directory / _RECORD, record)
    return None
