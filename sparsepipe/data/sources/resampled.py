"""ModelNet as text files of points with normals, ``modelnet40_normal_resampled``.

``<class>/<class>_0001.txt`` has lines ``x,y,z,nx,ny,nz``; ``modelnet40_shape_names.txt`` lists
the classes, ``modelnet40_train.txt`` and ``modelnet40_test.txt`` the shapes of each split
(``modelnet10_...`` those of the ten-class subset).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.files import (
    LIST_BYTES,
    digest_listing,
    digest_values,
    read_text,
    scan_files,
)
from sparsepipe.data.listing import Listing, named
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.data.sources.base import ListedShapes, require_root, wrong_layout
from sparsepipe.errors import DataError

WHERE_FROM = (
    "modelnet40_normal_resampled.zip is distributed with PointNet++ and its successors "
    "(made from ModelNet, https://modelnet.cs.princeton.edu, for research)"
)


class NormalResampled(ListedShapes):
    """Source: text files of points, of which the first ones are taken; normals are not used.

    Args:
        root: directory with the class folders and the lists of shapes.
        subset: 40 for all classes, 10 for the ten-class subset.
    """

    takes_first_points = True

    def __init__(self, root: Path | str | None, *, subset: int = 40) -> None:
        self.root = require_root(
            root, what="the directory modelnet40_normal_resampled", where_from=WHERE_FROM
        )
        self._prefix = f"modelnet{subset}"
        lists = [f"{self._prefix}_{name}.txt" for name in ("shape_names", *SPLITS)]
        if not all((self.root / name).exists() for name in lists):
            raise wrong_layout(self.root, expected=f"class folders, {', '.join(lists)}")

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of names, sizes and contents; see ``Source.fingerprint``."""
        scanned = [
            scan_files(self.root, self.listing(split).names, cache_directory=cache.directory)
            for split in SPLITS
        ]
        return digest_values([self._lines("shape_names"), *map(digest_listing, scanned)])

    def listing(self, split: Split) -> Listing:
        """The files of a split.

        Raises:
            DataError: a list is empty, or contains a shape of an unknown class.
        """
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
        text = read_text(path, limit_bytes=LIST_BYTES)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise DataError(f"{path} is empty", remedy=f"unpack the archive again; {WHERE_FROM}")
        return lines
