"""Generation of the built-in data set of shapes, as OFF files in ModelNet's layout.

A shape depends only on (seed, class, split, number), not on other classes, the counts or the
processes. A set can therefore be generated in part, interrupted, repaired by deleting files, or
generated again elsewhere, with the same bytes.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import trimesh

from sparsepipe.data.cache import parallel_map
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
    """Models an object of a class, randomly stretched, scaled and turned about z, which is up."""
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
_SETTINGS_FILE = "shapes.json"
"""File with the settings of a folder's shapes, written before the first shape."""
_SHAPES_PER_WORKER = 200
"""With fewer shapes for each, starting another process does not pay off."""
_MissingShape: TypeAlias = tuple[Path, str, Split, int, int]
"""File, class, split, number and seed of a shape."""


def generate_shapes(
    root: Path | str,
    *,
    classes: Sequence[str] | None = None,
    train_per_class: int,
    test_per_class: int,
    seed: int,
    workers: int = 1,
) -> None:
    """Models shapes and writes ``<root>/<class>/{train,test}/<class>_0001.off`` and so on.

    Only missing files are generated, each of them atomically, so that the next call continues
    where an interrupted one stopped. A folder has one set of settings; others raise a DataError.

    Arguments are as for ``GeneratedShapes``; ``workers`` is the largest number of processes.
    """
    settings = shapes_settings(classes, train_per_class, test_per_class, seed)
    root = Path(root)
    with explaining_storage(root, setting="data.root"):
        root.mkdir(parents=True, exist_ok=True)
        if not [name for name in os.listdir(root) if not name.startswith(".")]:
            write_plain_json(root / _SETTINGS_FILE, settings)
        if _recorded(root) != settings:
            raise DataError(
                f"{root} holds other data, or shapes generated with other settings",
                remedy=f"delete {root} to generate shapes anew, or choose an empty or new folder",
            )
        missing = list(_missing(root, settings))
        with (
            progress("modelling shapes") as advance,
            parallel_map(min(workers, len(missing) // _SHAPES_PER_WORKER), chunk=16) as mapped,
        ):
            for _ in mapped(_write, missing):
                advance(len(missing))


def is_complete(root: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a folder, which may be read-only, holds all shapes of these settings."""
    return _recorded(root) == settings and next(_missing(root, settings), None) is None


def shapes_settings(
    classes: Sequence[str] | None, train_per_class: int, test_per_class: int, seed: int
) -> dict[str, Any]:
    """Checks settings of ``generate_shapes`` and returns them in the form of ``shapes.json``."""
    chosen = SHAPE_CLASSES if classes is None else tuple(sorted(set(classes)))
    unknown = [name for name in chosen if name not in SHAPE_CLASSES]
    if unknown or not chosen or min(train_per_class, test_per_class, seed) < 0:
        raise ConfigError(
            f"the shape classes {', '.join(unknown or chosen) or '(none)'} with "
            f"train_per_class={train_per_class}, test_per_class={test_per_class} and seed={seed} "
            "cannot be generated: a class is unknown or missing, or a number negative",
            remedy=f"choose classes among {', '.join(SHAPE_CLASSES)}, and numbers of at least 0",
        )
    return {
        "classes": list(chosen),
        "train_per_class": train_per_class,
        "test_per_class": test_per_class,
        "seed": seed,
        "modeller_version": MODELLER_VERSION,
    }


def _recorded(root: Path) -> Any:
    try:
        return json.loads((root / _SETTINGS_FILE).read_text())
    except (OSError, ValueError):
        return None


def _missing(root: Path, settings: Mapping[str, Any]) -> Iterator[_MissingShape]:
    for class_name in settings["classes"]:
        for split in SPLITS:
            folder, present = root / class_name / split, set[str]()
            if folder.is_dir():
                with os.scandir(folder) as entries:
                    present = {entry.name for entry in entries if entry.stat().st_size > 0}
            for number in range(1, settings[f"{split}_per_class"] + 1):
                name = f"{class_name}_{number:04d}.off"
                if name not in present:
                    yield folder / name, class_name, split, number, settings["seed"]


def _write(shape: _MissingShape) -> None:
    path, class_name, split, number, seed = shape
    own = [seed, zlib.crc32(class_name.encode()), SPLITS.index(split), number]
    write_off(make_shape(class_name, np.random.default_rng(own)), path)
