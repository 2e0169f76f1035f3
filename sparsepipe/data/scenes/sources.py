"""Scenes of a user's folder, each parsed once into a cache from which its arrays are mapped.

Shapes: S scenes of a split, P points, C channels.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, combinations
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
    log_once,
    new_array,
    require_root,
    scan_files,
)
from sparsepipe.data.listing import named, raised, read_table
from sparsepipe.data.points import IntArray, MappedArray, Split
from sparsepipe.data.scenes.formats import READERS, is_scene, members_of
from sparsepipe.data.scenes.reader import SceneReader
from sparsepipe.data.scenes.scene import Scene
from sparsepipe.errors import REMEDY, ConfigError, DataError
from sparsepipe.utils.files import expanded, write_plain_json
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.progress import progress
from sparsepipe.utils.reading import explained, parse_json, read_text

Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")
_RECORD = "scene.json"
"""Name of the file of a stored scene that is written last."""
_VERSION = 3
"""Increased with any change to the files of the cache."""
_BYTES_PER_WORKER = 50e6
"""Bytes of scenes that justify starting a process that reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneSet:
    """The scenes of a split, of which ``train`` includes those for validation.

    Attributes:
        directories: directory of each scene in the cache, with ``points.npy``, float32 [P, 3 + C],
            positions and features, and ``labels.npy`` [P], if the scene has labels.
        files: path of each scene's own file or folder.
        reader: turns labels in files into class numbers.
        labels_S: 0 for scenes with labels, else -1.
        groups: what each scene belongs to, such as a building.
        held_S: which scenes are for validation.
    """

    directories: Sequence[Path]
    files: Sequence[str]
    reader: SceneReader
    labels_S: IntArray
    groups: Sequence[str]
    held_S: NDArray[np.bool_]

    def read(self, index: int) -> Scene:
        """Returns a scene, whose points are mapped, with class numbers as labels."""
        directory = self.directories[index]
        (record,) = _records([directory])
        points = MappedArray(directory / "points.npy").array
        ends, labels_P = np.cumsum([3, *record["widths"].values()])[:-1], None
        coords_P3, *features = np.split(points, ends, axis=1)
        if record["values"] is not None:
            numbers = self.reader.class_numbers(record["values"], source=self.files[index])
            labels_P = numbers[MappedArray(directory / "labels.npy").array]
        return Scene(
            coords_P3,
            features=dict(zip(record["widths"], features, strict=True)),
            labels_P=labels_P,
            origin_3=np.array(record["origin"]),
        )


class SceneFolder:
    """Source: scenes of any format in a folder and in the folders within it.

    Args:
        root: the folder.
        reader: reads the scenes.
        cache: settings of the cache.
        split: what divides the scenes. None: folders named train, val and test if there are any,
            else the share 0.2; a number: the share of groups for testing, drawn always the same; a
            path: a csv file with the columns file, relative to ``root``, and split; or a mapping of
            ``train``, ``val`` and ``test`` to names or patterns, or to the path of a file with
            some, of scenes or of folders around them. Without ``train``, all others are for it.
        group: regular expression. Scenes in whose paths it finds the same text belong together: a
            share has all of them or none, and no two parts have some. None: each scene is a group.
        pattern: pattern of the paths of scenes, relative to ``root``; others are left out.
    """

    def __init__(
        self,
        root: Path | str | None,
        *,
        reader: SceneReader,
        cache: CacheSettings,
        split: float | str | Mapping[str, Any] | None = None,
        group: str | None = None,
        pattern: str = "*",
    ) -> None:
        where_from = f"scenes are files of {', '.join(READERS)}, or folders of one scene each"
        self.root = require_root(root, what="a folder of scenes", where_from=where_from)
        self._reader, self._cache, self._split, self._group = reader, cache, split, group
        self._pattern = pattern

    @cached_property
    def _names(self) -> Mapping[Part, Sequence[str]]:
        """Paths of the scenes of each part, relative to the root, with forward slashes."""
        names, split = fnmatch.filter(scene_names(self.root), self._pattern), self._split
        if isinstance(split, str):
            given = expanded(split)
            path = given if given.exists() else self.root / given
            rows = read_table(path, columns=("file", "split"), splits=PARTS)
            split = {part: [row["file"] for row in rows if row["split"] == part] for part in PARTS}
        if isinstance(split, Mapping):
            found = _by_names(self.root, names, split)
        else:
            folders = {name: name.lower().split("/")[:-1] for name in names}
            parts = {n: next((p for p in folders[n] if p in PARTS), None) for n in names}
            found = {part: [n for n in names if parts[n] == part] for part in PARTS}
            outside = [name for name in names if parts[name] is None]
            if len(outside) == len(names):
                groups = {name: self._group_of(name) for name in names}
                tested = _share(groups.values(), 0.2 if split is None else split)
                test = [name for name in names if groups[name] in tested]
                log_once(f"scenes to test on, {len(test)} of {len(names)}: {named(sorted(tested))}")
                found = {"train": sorted({*names} - {*test}), "val": [], "test": test}
            elif split is not None:
                raise ConfigError(
                    f"data.split={split} is given, but folders in {self.root} divide its scenes",
                    remedy="set data.split=null, or to a mapping of train and test to names",
                )
            elif not found["train"]:
                found["train"] = outside
            elif outside:
                log_once(f"scenes outside train, val and test are left out: {named(outside)}")
        if not found["test"]:
            found = {**found, "test": found["val"], "val": []}
        parts_of = Counter(chain(*({self._group_of(n) for n in each} for each in found.values())))
        if cut := [group for group, count in parts_of.items() if count > 1 and self._group]:
            raise ConfigError(
                f"data.split cuts the group {cut[0]!r} of data.group",
                remedy="keep all scenes of a group in one part, or set data.group=null",
            )
        if not found["train"]:
            raise DataError(
                f"{self.root} has {len(names)} scenes, none of which is for training",
                remedy="correct data.split and data.source.pattern, or set data.root to a folder "
                f"with files of {', '.join(READERS)}",
            )
        return found

    def _group_of(self, name: str) -> str:
        if not self._group:
            return name
        if (match := re.search(self._group, name)) is None:
            raise ConfigError(
                f"data.group={self._group} finds nothing in {name}",
                remedy="correct the regular expression, which is searched in the paths of scenes",
            )
        return match.group()

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; if neither settings nor a learning map have any, numbers."""
        if self._reader.classes:
            return tuple(map(str, self._reader.classes))
        if isinstance(self._reader.learning_map, Mapping):
            return tuple(map(str, range(max(self._reader.learning_map.values()) + 1)))
        records = _records(self.load("train").directories)
        values = [value for record in records for value in record["values"] or ()]
        numbers = self._reader.class_numbers([*{*values}], source=self.root)
        return tuple(map(str, range(int(numbers.max(initial=-1)) + 1)))

    def load(self, split: Split) -> SceneSet:
        """Returns the scenes of a split, after parsing those that are new.

        Raises:
            DataError: scenes are not valid, lack a feature, have labels of no class or, for
                training, no labels; the valid ones are in the cache nevertheless.
        """
        held = list(self._names["val"]) if split == "train" else []
        names = [*self._names[split], *held]
        directories = stored_scenes(self.root, names, reader=self._reader, cache=self._cache)
        files, records = [str(self.root / name) for name in names], _records(directories)
        reader = self._reader  # which may find the classes in the split train
        reader = reader if split == "train" else replace(reader, classes=self.classes)
        for file, record in zip(files, records, strict=True):
            reader.class_numbers(record["values"] or (), source=file)
            if split == "train" and record["values"] is None:
                raise DataError(
                    f"{file} is for training, but its points have no labels",
                    remedy="set data.label to the name of their column, or leave the scene out",
                )
        return SceneSet(
            directories=directories,
            files=files,
            reader=reader,
            labels_S=np.array([-1 if r["values"] is None else 0 for r in records], np.int64),
            groups=[self._group_of(name) for name in names],
            held_S=np.arange(len(names)) >= len(names) - len(held),
        )

    def fingerprint(self) -> str:
        """Returns a hex digest of the scenes of each part, and of what maps their labels."""
        digests = [
            [part, name, digest]
            for part, names in self._names.items()
            for name, digest in zip(names, _digests(self.root, names, self._cache), strict=True)
        ]
        return digest_values([digests, repr(self._reader)])


def scene_names(root: Path) -> list[str]:
    """Returns the paths of all scenes in a folder, relative to it, in order.

    Names that begin with ``.`` or ``_`` are left out.
    """
    found = list[Path]()
    with explaining_storage(root, setting="data.root"):
        for place, folders, files in os.walk(root, onerror=raised, followlinks=True):
            folders[:] = [name for name in folders if name[0] not in "._"]
            visible = [name for name in (*folders, *files) if name[0] not in "._"]
            scenes = [name for name in visible if is_scene(Path(place, name))]
            found += [Path(place, name) for name in scenes]
            folders[:] = {*folders}.difference(scenes)
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
    known, rooted = {name: {name} for name in names}, {*names}
    for name in names:
        parts = [*Path(name).parent.parts, Path(name).stem]
        for start, end in combinations(range(len(parts) + 1), 2):
            known.setdefault("/".join(parts[start:end]), set()).add(name)
        rooted |= {"/".join(parts[:end]) for end in range(1, len(parts) + 1)}
    found = {part: set[str]() for part in split}
    for part, given in split.items():
        listed = _listed(root, given) if isinstance(given, str) else [str(each) for each in given]
        # A list's names may begin with folders above the root.
        tails = [
            [each, *("/".join(each.split("/")[n:]) for n in range(1, each.count("/") + 1))]
            for each in listed
        ]
        keys = [
            [each[0]]
            if each[0] in known
            else [key for key in each if key in rooted][:1] or fnmatch.filter(known, each[0])
            for each in tails
        ]
        if absent := [name for name, some in zip(listed, keys, strict=True) if not some]:
            raise DataError(
                f"data.split names scenes for {part} that are not in {root}: {named(absent)}",
                remedy="correct the names, which are those of scenes or of folders around them",
            )
        found[part] = {name for some in keys for key in some for name in known[key]}
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
) -> list[Path]:
    """Returns the directories of scenes in the cache, after parsing those that it lacks.

    Raises:
        DataError: some scenes are not valid; the others are in the cache nevertheless.
    """
    base, settings = cache.directory / "scenes", (reader.features, reader.columns, reader.label)
    digests = _digests(root, names, cache)
    directories = [base / digest_values([_VERSION, repr(settings), each]) for each in digests]
    places = [(root / name, each) for name, each in zip(names, directories, strict=True)]
    with explaining_storage(base, setting="data.cache_dir"):
        if not all((directory / _RECORD).is_file() for directory in directories):
            with locked(base / "lock", wait_s=cache.lock_wait_s):
                new = [place for place in places if not (place[1] / _RECORD).is_file()]
                _store_all(new, reader, cache.workers or usable_cores())
    return directories


def _records(directories: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads((directory / _RECORD).read_text()) for directory in directories]


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
        scene, values, *_ = reader.parse(path)
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
