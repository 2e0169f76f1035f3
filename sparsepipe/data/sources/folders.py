"""A user's own shapes in a folder, with or without folders of classes and splits.

Shapes: F faces, P points that are stored of a shape, Q points of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import digest_listing, digest_values, scan_files
from sparsepipe.data.listing import Listing, list_folder
from sparsepipe.data.mesh_rows import COUNTED_NUMBERS, SurfaceSampler, counted, quantise
from sparsepipe.data.points import FloatArray, PointSet, Split
from sparsepipe.data.shape_files import SHAPE_SUFFIXES, read_shape
from sparsepipe.data.sources.base import CacheSettings, Source, open_points, require_root
from sparsepipe.data.sources.npz import NpzBundle

_DOMAIN_SUFFIXES = (".npy", ".xyz", ".glb", ".obj", ".off", ".stl", ".ply")
"""Of shapes in folders of domains, in which other text files and archives are not data."""


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


class ClassFolder(ListedShapes):
    """Source: meshes and clouds of any formats in folders of their classes.

    Args:
        root: the folder.
        split: how shapes are divided for training and testing. A number is the share of each
            class's files for testing, drawn at random but always the same for a seed. A path is
            that of a csv file with the columns ``file``, relative to ``root``, and ``split``,
            ``train`` or ``test``; other files are left out. None takes the folders ``train`` and
            ``test`` where there are any, and otherwise the share 0.2.
        seed: of the share; not that of a run, so that all runs are tested on the same shapes.

    Raises:
        ConfigError: ``split`` is neither, or a share where folders divide the files.
        DataError: there is no such folder or csv file, they do not fit together, or a class has
            no shape for training.
    """

    def __init__(
        self, root: Path | str | None, *, split: float | str | None = None, seed: int = 0
    ) -> None:
        root = require_root(
            root,
            what="a folder with a folder for each class",
            where_from=f"those hold files of {', '.join(SHAPE_SUFFIXES)}",
        )
        super().__init__(
            root,
            list_folder(root, suffixes=SHAPE_SUFFIXES, split=split, seed=seed, needs_classes=True),
        )


class ShapeFolder(ListedShapes):
    """Source: meshes and clouds in a folder, with or without folders of classes.

    Args:
        root: the folder.
        test_share: share of the files for testing, where there are no folders for it.

    Raises:
        ConfigError: the share is out of its range.
        DataError: there is no such folder, or it has another layout.
    """

    def __init__(self, root: Path | str | None, *, test_share: float = 0.2) -> None:
        root = require_root(
            root,
            what="a folder of meshes or clouds",
            where_from=f"it holds files of {', '.join(_DOMAIN_SUFFIXES)}",
        )
        super().__init__(root, list_folder(root, suffixes=_DOMAIN_SUFFIXES, share=test_share))


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
