"""ModelNet's layouts: trees of OFF files, existing or generated, and text files of points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.files import (
    LOCK_WAIT_S,
    digest_listing,
    digest_values,
    explaining_storage,
    locked,
    require_root,
    scan_files,
)
from sparsepipe.data.listing import Listing, find_files, make_listing, named, unread_formats
from sparsepipe.data.points import SPLITS, MappedArray, Split
from sparsepipe.data.shape_rows import ShapeSampler, SurfaceVoxels
from sparsepipe.data.shapes import generate_shapes
from sparsepipe.data.shapes.generate import MODELLER_VERSION, is_complete, shapes_settings
from sparsepipe.data.sources.listed import ListedShapes, open_rows
from sparsepipe.data.voxels import Span
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils import reading
from sparsepipe.utils.arguments import Count, checked
from sparsepipe.utils.files import expanded
from sparsepipe.utils.host import usable_cores

_WHERE_FROM = (
    "ModelNet10.zip and ModelNet40.zip are at https://modelnet.cs.princeton.edu (for research): "
    "name the directory that holds the class folders; data=folder reads meshes and clouds of any "
    "format in folders of classes"
)
_RESAMPLED_FROM = (
    "modelnet40_normal_resampled.zip is distributed with PointNet++ and its successors (made from "
    "ModelNet, https://modelnet.cs.princeton.edu, for research)"
)


class OffTree(ListedShapes):
    """Source: OFF meshes ``<class>/<split>/<name>.off``, from which points are sampled once.

    Folders whose names begin with ``.`` or ``_`` (such as ``__MACOSX``) are ignored.

    Args:
        root: directory with one folder for each class.
    """

    def __init__(self, root: Path | str | None) -> None:
        what = "a tree of OFF meshes in ModelNet's layout"
        self.root = require_root(root, what=what, where_from=_WHERE_FROM)

    def listing(self, split: Split) -> Listing:
        """Returns the files of a split."""
        found, others = find_files(self.root, (".off",))
        placed = [file for file in found if file.class_name and file.split]
        if not placed:
            raise DataError(
                f"data.root={self.root} has no files <class>/train/*.off or <class>/test/*.off"
                + unread_formats(others, ()),
                remedy=f"set data.root to another directory; {_WHERE_FROM}",
            )
        folders = {each.name for each in self.root.iterdir() if each.is_dir()} - {*SPLITS}
        classes = {name for name in folders if name[0] not in "._"}
        return make_listing(
            self.root,
            split,
            [file for file in placed if file.split == split],
            sorted(classes | {file.class_name for file in placed}),
            (".off",),
        )

    def load_surface(
        self, split: Split, cache: CacheSettings, *, resolution: int, span: Span
    ) -> MappedArray:
        """Returns packed bits [files, ceil(R^3 / 8)]: the voxels that each mesh's surface crosses.

        ``rows_S`` of the split's ``PointSet`` has the index of each shape among these files.
        """
        reader = SurfaceVoxels(ShapeSampler(cache.points, cache.seed), resolution, span)
        cached = open_rows(self.listing(split), reader, cache)
        assert np.isin(self.load(split, cache).rows_S, cached.usable_S).all()
        return cached.rows

    def fingerprint(self, cache: CacheSettings) -> str:
        """Returns a hex digest of the files' names, sizes and contents."""
        names = [name for split in SPLITS for name in self.listing(split).names]
        files = scan_files(self.root, names, cache_directory=cache.directory)
        return digest_values(digest_listing(files))


class GeneratedShapes(OffTree):
    """Source: procedurally generated objects of twenty classes, in ModelNet's layout.

    Each combination of counts, seed and classes, and each version of the generator, has a separate
    directory under ``root``, so that a small set is never mistaken for the full set, nor an old set
    for a new one.

    Args:
        root: directory to write to; created if it is missing.
        train_per_class: number of training shapes of each class.
        test_per_class: number of test shapes of each class.
        classes: names of the classes; None: all twenty.
        seed: seed of the shapes.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None,
        *,
        train_per_class: Count = 200,
        test_per_class: Count = 52,
        classes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not root:
            raise ConfigError(
                "data.root is not set", remedy="set data.root to a directory to write shapes into"
            )
        self._asked: dict[str, Any] = {
            "classes": classes,
            "train_per_class": train_per_class,
            "test_per_class": test_per_class,
            "seed": seed,
        }
        self._settings = shapes_settings(**self._asked)
        name = f"v{MODELLER_VERSION}_train{train_per_class}_test{test_per_class}_seed{seed}"
        if classes is not None:
            name += "_" + "+".join(self._settings["classes"])
        self.root = expanded(root).absolute() / name
        self._complete = False

    def listing(self, split: Split) -> Listing:
        """Returns the files of a split, after generating missing ones."""
        # A complete set may be in a read-only directory, where no lock can be created.
        self._complete = self._complete or is_complete(self.root, self._settings)
        if not self._complete:
            with (
                explaining_storage(self.root, setting="data.root"),
                locked(self.root / ".lock", wait_s=LOCK_WAIT_S),
            ):
                generate_shapes(self.root, workers=usable_cores(), **self._asked)
            self._complete = True
        return super().listing(split)


class NormalResampled(ListedShapes):
    """Source: text files of ``modelnet40_normal_resampled``, the first ``cached_points`` of each.

    ``<class>/<class>_0001.txt`` has lines ``x,y,z,nx,ny,nz``, of which only x, y and z are used;
    ``modelnet40_shape_names.txt`` lists the classes, ``modelnet40_train.txt`` and
    ``modelnet40_test.txt`` the shapes of each split (``modelnet10_...``: the same for ten classes).

    Args:
        root: directory with the class folders and the lists of shapes.
        subset: 40 for all classes, 10 for the ten-class subset.
    """

    takes_first_points = True

    def __init__(self, root: Path | str | None, *, subset: int = 40) -> None:
        what = "the directory modelnet40_normal_resampled"
        self.root = require_root(root, what=what, where_from=_RESAMPLED_FROM)
        self._prefix = f"modelnet{subset}"

    def fingerprint(self, cache: CacheSettings) -> str:
        """Returns a hex digest of the list of classes, and of the files' names and contents."""
        return digest_values([self._lines("shape_names"), *self._digests(cache)])

    def listing(self, split: Split) -> Listing:
        """Returns the files of a split."""
        shapes = self._lines(split)
        numbers = {name: number for number, name in enumerate(self._lines("shape_names"))}
        owners = [shape.rpartition("_")[0] for shape in shapes]
        if unknown := sorted({*owners} - {*numbers}):
            raise DataError(
                f"{self.root}/{self._prefix}_{split}.txt lists shapes of unknown classes: "
                f"{named(unknown)}",
                remedy=f"add them to {self._prefix}_shape_names.txt or take the lists from the "
                "same archive",
            )
        return Listing(
            root=self.root,
            split=split,
            names=tuple(
                f"{owner}/{shape}.txt" for owner, shape in zip(owners, shapes, strict=True)
            ),
            labels_S=np.array([numbers[owner] for owner in owners], np.int64),
            classes=tuple(numbers),
        )

    def _lines(self, name: str) -> list[str]:
        path = self.root / f"{self._prefix}_{name}.txt"
        with reading.explained(path, "list", error=DataError, remedy=_RESAMPLED_FROM):
            lines = [line.strip() for line in reading.read_text(path).splitlines() if line.strip()]
            if not lines:
                raise ValueError("it is empty")
        return lines
