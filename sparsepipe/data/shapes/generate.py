"""Generation of the embedded data set as OFF files in ModelNet's layout.

A shape depends only on (seed, class, split, number), not on other classes, the counts or the
processes. A set can therefore be generated in part, interrupted, repaired by deleting files, or
generated again elsewhere, with the same bytes.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import trimesh

from sparsepipe.data.cache import MAIN_GUARD, worker_pool
from sparsepipe.data.files import explaining_storage
from sparsepipe.data.formats.off import write_off
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.data.shapes import furniture, objects
from sparsepipe.data.shapes.solids import Part, between, join
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.files import write_plain_json
from sparsepipe.utils.progress import progress

Builder: TypeAlias = Callable[[np.random.Generator], list[Part]]

BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "airplane": objects.airplane,
        "armchair": furniture.armchair,
        "bookshelf": furniture.bookshelf,
        "cabinet": furniture.cabinet,
        "chair": furniture.chair,
        "desk": furniture.desk,
        "dresser": furniture.dresser,
        "flange": objects.flange,
        "gear": objects.gear,
        "guitar": objects.guitar,
        "jug": objects.jug,
        "lamp": furniture.lamp,
        "mug": objects.mug,
        "pulley": objects.pulley,
        "stool": furniture.stool,
        "table": furniture.table,
        "trolley": furniture.trolley,
        "urn": objects.urn,
        "vase": objects.vase,
        "wheel": objects.wheel,
    }
)
SHAPE_CLASSES: tuple[str, ...] = tuple(BUILDERS)


def make_shape(class_name: str, rng: np.random.Generator) -> trimesh.Trimesh:
    """A random object of a class, with z up, random rotation and random scale.

    Raises:
        ConfigError: the class is unknown.
    """
    if class_name not in BUILDERS:
        raise ConfigError(
            f"the shape class {class_name!r} is unknown",
            remedy=f"choose from {', '.join(SHAPE_CLASSES)}",
        )
    mesh = join(BUILDERS[class_name](rng))
    angle, scale = between(rng, 0, 2 * np.pi), np.exp(between(rng, -1, 1))
    # Proportions vary in addition to the builder's own variation.
    stretch_3 = scale * np.exp(rng.uniform(-0.3, 0.3, 3))
    cosine, sine = np.cos(angle), np.sin(angle)
    turn_33 = np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
    mesh.vertices = np.asarray(mesh.vertices) * stretch_3 @ turn_33.T
    return mesh


MODELLER_VERSION = 2
"""Increased with any change to a shape's triangles; part of the folder's name."""
SETTINGS_FILE = "shapes.json"
"""Settings of a folder's shapes; written before the first shape."""
_CHUNK_SHAPES = 16
_SHAPES_PER_WORKER = 200
"""Fewer shapes per worker do not repay the start of a process."""


@dataclass(frozen=True, slots=True)
class ShapesSettings:
    """Settings of a folder of generated shapes."""

    classes: tuple[str, ...]
    train_per_class: int
    test_per_class: int
    seed: int
    modeller_version: int = MODELLER_VERSION


@dataclass(frozen=True, slots=True)
class _Task:
    """One shape to model and write."""

    path: Path
    class_name: str
    split: Split
    number: int
    seed: int


def generate_shapes(
    root: Path | str,
    *,
    classes: Sequence[str] | None = None,
    train_per_class: int,
    test_per_class: int,
    seed: int,
    workers: int = 1,
) -> None:
    """Model shapes and write ``<root>/<class>/{train,test}/<class>_0001.off`` and on.

    Only missing files are generated, each of them atomically, so that an interrupted call
    continues where it stopped. A folder has one set of settings, recorded in ``shapes.json``.

    Arguments as for ``GeneratedShapes``, and ``workers``, the number of processes.

    Raises:
        ConfigError: unknown classes or negative counts.
        DataError: the folder holds other data, or cannot be written to.
    """
    settings = shapes_settings(classes, train_per_class, test_per_class, seed)
    root = Path(root)
    _claim(root, settings)
    with explaining_storage(root, setting="data.root"):
        tasks = list(_missing(root, settings))
        workers = min(workers, len(tasks) // _SHAPES_PER_WORKER)
        with progress("modelling shapes") as advance, closing(_write_all(tasks, workers)) as parts:
            for done in parts:
                for _ in range(done):
                    advance(len(tasks))


def is_complete(root: Path, settings: ShapesSettings) -> bool:
    """Whether a folder holds all shapes of these settings; works in read-only folders."""
    try:
        recorded = json.loads((root / SETTINGS_FILE).read_text())
    except (OSError, ValueError):
        return False
    return recorded == _plain_settings(settings) and next(_missing(root, settings), None) is None


def shape_rng(seed: int, class_name: str, split: Split, number: int) -> np.random.Generator:
    """The random generator of one shape."""
    return np.random.default_rng(
        [seed, zlib.crc32(class_name.encode()), SPLITS.index(split), number]
    )


def shapes_settings(
    classes: Sequence[str] | None, train_per_class: int, test_per_class: int, seed: int
) -> ShapesSettings:
    """Checked settings; see ``generate_shapes``."""
    chosen = SHAPE_CLASSES if classes is None else tuple(sorted(set(classes)))
    unknown = [name for name in chosen if name not in SHAPE_CLASSES]
    if unknown or not chosen:
        raise ConfigError(
            f"the shape classes {', '.join(unknown)} are unknown"
            if unknown
            else "no classes chosen",
            remedy=f"choose from {', '.join(SHAPE_CLASSES)}",
        )
    if min(train_per_class, test_per_class, seed) < 0:
        raise ConfigError(
            f"train_per_class={train_per_class}, test_per_class={test_per_class} and "
            f"seed={seed} must not be negative",
            remedy="set them to 0 or more",
        )
    return ShapesSettings(chosen, train_per_class, test_per_class, seed)


def _claim(root: Path, settings: ShapesSettings) -> None:
    """Record the settings in an empty folder, or check that the recorded ones are equal."""
    path = root / SETTINGS_FILE
    expected = _plain_settings(settings)
    try:
        with explaining_storage(root, setting="data.root"):
            root.mkdir(parents=True, exist_ok=True)
        foreign = [name for name in os.listdir(root) if not name.startswith(".")]
        if not foreign:
            write_plain_json(path, expected)
        found = json.loads(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot use {root} for generated shapes: {error}",
            remedy="choose a folder you can write to, or delete this one",
        ) from error
    if found is None:
        raise DataError(
            f"{root} holds other data ({', '.join(sorted(foreign)[:3])}, ...)",
            remedy="choose an empty or new folder for the generated shapes",
        )
    if found != expected:
        differing = [
            key
            for key in expected
            if not isinstance(found, dict) or found.get(key) != expected[key]
        ]
        raise DataError(
            f"{root} holds shapes generated with other settings ({', '.join(differing)})",
            remedy=f"delete {root} to generate them anew, or choose another folder",
        )


def _plain_settings(settings: ShapesSettings) -> dict[str, Any]:
    """Settings in the form in which JSON returns them."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return plain


def _missing(root: Path, settings: ShapesSettings) -> Iterator[_Task]:
    counts: dict[Split, int] = {"train": settings.train_per_class, "test": settings.test_per_class}
    for class_name in settings.classes:
        for split, count in counts.items():
            folder = root / class_name / split
            present = _present(folder)
            for number in range(1, count + 1):
                name = f"{class_name}_{number:04d}.off"
                if name not in present:
                    yield _Task(folder / name, class_name, split, number, settings.seed)


def _present(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.stat().st_size > 0}
    except FileNotFoundError:
        return set()


def _write(task: _Task) -> int:
    rng = shape_rng(task.seed, task.class_name, task.split, task.number)
    write_off(make_shape(task.class_name, rng), task.path)
    return 1


def _write_some(tasks: Sequence[_Task]) -> int:
    return sum(map(_write, tasks))


def _write_all(tasks: Sequence[_Task], workers: int) -> Generator[int]:
    """Yield the number of shapes written since the last one."""
    if workers <= 1:
        yield from map(_write, tasks)
        return
    chunks = [tasks[i : i + _CHUNK_SHAPES] for i in range(0, len(tasks), _CHUNK_SHAPES)]
    try:
        with worker_pool(workers) as pool:
            yield from pool.map(_write_some, chunks)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that models shapes was killed or ran out of memory",
            remedy="run the same command again, perhaps with fewer workers: what is written "
            f"is kept; {MAIN_GUARD}",
        ) from error
