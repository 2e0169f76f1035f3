"""Files in a user's folder, with or without folders of classes, with or without splits.

A path in it is ``[<class>/][train/|test/]<name>``, the split before or behind the class.

Shapes: F faces, P points that are stored of a shape, Q points of a file.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import digest_listing, digest_values, explaining_storage, scan_files
from sparsepipe.data.mesh_rows import COUNTED_NUMBERS, SurfaceSampler, counted, quantise
from sparsepipe.data.points import SPLITS, FloatArray, PointSet, Split
from sparsepipe.data.shape_files import read_shape
from sparsepipe.data.sources.base import CacheSettings, Listing, Source, open_points, require_root
from sparsepipe.data.sources.npz import NpzBundle
from sparsepipe.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)

_NAMED = 5
_LAYOUT = (
    "a folder holds files, or folders of classes with files; the folders train and test, in it or "
    "in those of its classes, divide them"
)
_DOMAIN_SUFFIXES = (".npy", ".xyz", ".glb", ".obj", ".off", ".stl", ".ply")
"""Of shapes in folders of domains, in which other text files and archives are not data."""


def list_folder(
    root: Path, *, suffixes: Collection[str], test_share: float
) -> Mapping[Split, Listing]:
    """The files of both splits, in the order of their names.

    Where there are no folders ``train`` and ``test``, a share of the files of each class is for
    testing, spread evenly over their order. Files and folders whose names begin with ``.`` or
    ``_`` are left out, other files as well, which the log says.

    Args:
        root: the folder.
        suffixes: of the files, in lower case.
        test_share: in (0, 1).

    Raises:
        ConfigError: the share is out of its range.
        DataError: there are no files for training or none for testing, some have a class or a
            split and others do not, or folders are nested more deeply.
    """
    if not 0 < test_share < 1:
        raise ConfigError(
            f"data.module.source.test_share={test_share} is not valid",
            remedy="set it to a number between 0 and 1",
        )
    placed = [(name, *_place(root, name)) for name in _names(root, suffixes)]  # name, class, split
    for number, what in ((1, "folders of classes"), (2, "folders train and test")):
        within = [name for name, *place in placed if place[number - 1] is not None]
        outside = [name for name, *place in placed if place[number - 1] is None]
        if within and outside:
            raise DataError(
                f"{root} has files in {what}, such as {within[0]}, and others outside of them, "
                f"such as {outside[0]}",
                remedy=f"move the one or the other; {_LAYOUT}",
            )
    classes = sorted({of for _, of, _ in placed if of is not None})
    found: dict[Split, list[tuple[str, int]]] = {split: [] for split in SPLITS}
    for label, its_class in enumerate(classes) if classes else [(-1, None)]:
        files = [(name, split) for name, of, split in placed if of == its_class]
        tested = min(max(round(test_share * len(files)), 1), len(files) - 1)
        for number, (name, split) in enumerate(files):
            is_tested = (number + 1) * tested // len(files) > number * tested // len(files)
            found[split or ("test" if is_tested else "train")].append((name, label))
    _check_counts(root, found, classes, suffixes)
    return {
        split: Listing(
            root=root,
            split=split,
            names=tuple(name for name, _ in files),
            labels_S=np.array([label for _, label in files], np.int64),
            classes=tuple(classes),
        )
        for split, files in found.items()
    }


def _names(root: Path, suffixes: Collection[str]) -> list[str]:
    """Paths of the files with a suffix, relative to the root, with forward slashes."""
    found, others = list[str](), list[str]()
    with explaining_storage(root, setting="data.root"):
        for path in sorted(root.rglob("*")):
            inner = path.relative_to(root)
            if any(part.startswith((".", "_")) for part in inner.parts) or not path.is_file():
                continue
            taken = found if path.suffix.lower() in suffixes else others
            taken.append(inner.as_posix())
    if others:
        _LOG.warning(
            "%s: %d files that are none of %s are ignored, such as %s; labels are the names of "
            "folders",
            *(root, len(others), ", ".join(suffixes), ", ".join(others[:_NAMED])),
        )
    return found


def _place(root: Path, name: str) -> tuple[str | None, Split | None]:
    """The class and the split of a file by its folders."""
    folders = name.split("/")[:-1]
    splits = [split for split in SPLITS if split in folders]
    classes = [folder for folder in folders if folder not in SPLITS]
    if len(folders) > len(splits) + len(classes) or len(splits) > 1 or len(classes) > 1:
        raise DataError(
            f"{root / name} lies in {len(folders)} folders within each other",
            remedy=f"move it; {_LAYOUT}",
        )
    return next(iter(classes), None), next(iter(splits), None)


def _check_counts(
    root: Path,
    found: Mapping[Split, list[tuple[str, int]]],
    classes: list[str],
    suffixes: Collection[str],
) -> None:
    kinds = ", ".join(suffixes)
    for split, files in found.items():
        if not files:
            raise DataError(
                f"{root} has no {split} samples: no file of {kinds} is for that",
                remedy=f"put at least two files there, or leave this domain out; {_LAYOUT}",
            )
    trained = Counter(label for _, label in found["train"])
    if absent := [name for label, name in enumerate(classes) if label not in trained]:
        raise DataError(
            f"{root} has no train sample of class {', '.join(absent)}",
            remedy=f"put files of {kinds} there, or remove the class's folder",
        )


class ListedShapes:
    """Base of sources whose shapes are files of any formats, see :func:`read_shape`.

    A mesh is sampled as in :class:`OffTree`. Of a cloud with more points than are stored some are
    drawn, of one with fewer some are repeated.

    Args:
        root: the folder of the files.
        listings: the files of each split.

    Attributes:
        listings: the files of each split.
    """

    takes_cached_points = True

    def __init__(self, root: Path, listings: Mapping[Split, Listing]) -> None:
        self.root, self.listings = root, listings

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The clouds of a split; see ``Source.load``."""
        return open_points(self.listings[split], FileSampler(cache.points, cache.seed), cache)

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of names, sizes and contents; see ``Source.fingerprint``."""
        digests = [
            digest_listing(scan_files(self.root, each.names, cache_directory=cache.directory))
            for each in self.listings.values()
        ]
        return digest_values(digests)


class ShapeFolder(ListedShapes):
    """Source: meshes and clouds in a folder, see :func:`list_folder`.

    Args:
        root: the folder.
        test_share: share of the files for testing, where there are no folders for it.

    Raises:
        ConfigError: the share is out of its range.
        DataError: there is no such folder, or it has another layout.
    """

    def __init__(self, root: Path | str | None, *, test_share: float = 0.2) -> None:
        root = require_root(root, what="a folder of meshes or clouds", where_from=_LAYOUT)
        listings = list_folder(root, suffixes=_DOMAIN_SUFFIXES, test_share=test_share)
        super().__init__(root, listings)


def shape_folder(root: Path | str | None, *, test_share: float = 0.2) -> Source:
    """The source of a folder: ``train.npz`` and ``test.npz``, or a file for each shape.

    Arguments and errors as of :class:`ShapeFolder`.
    """
    if root is not None and (Path(root) / "train.npz").is_file():
        return NpzBundle(root, needs_labels=False)
    return ShapeFolder(root, test_share=test_share)


@dataclass(frozen=True, slots=True)
class FileSampler(SurfaceSampler):
    """Points of a mesh's surface, or those of a cloud, quantised to the shape's box."""

    kind: ClassVar[str] = "files"
    meta_size: ClassVar[int] = COUNTED_NUMBERS

    def settings(self) -> dict[str, Any]:
        """Everything besides the files that determines the rows."""
        return {**SurfaceSampler.settings(self), "files": 2}

    def __call__(self, path: Path, digest: str) -> tuple[NDArray[np.uint16], FloatArray]:
        """Quantised points [P, 3] of one file; their frame, and how many points the file has.

        Raises:
            DataError: the file cannot be read, or holds neither a surface nor points.
        """
        return self.quantised(read_shape(path), digest)

    def quantised(
        self, values: NDArray[np.float64], digest: str
    ) -> tuple[NDArray[np.uint16], FloatArray]:
        """See :meth:`__call__`; of triangles [F, 3, 3] or points [Q, 3]."""
        if values.ndim == 3:
            return counted(*quantise(*self.sample(values, digest)), self.points)
        rng = np.random.default_rng([self.seed, int(digest, 16)])
        count = len(values)
        drawn_P = np.concatenate([rng.permutation(count) for _ in range(-(-self.points // count))])[
            : self.points
        ]
        rows = quantise(values[drawn_P], values.min(axis=0), values.max(axis=0))
        return counted(*rows, count)
