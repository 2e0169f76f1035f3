"""ModelNet as text files of points with normals, ``modelnet40_normal_resampled``.

``<class>/<class>_0001.txt`` has lines ``x,y,z,nx,ny,nz``; ``modelnet40_shape_names.txt`` lists
the classes, ``modelnet40_train.txt`` and ``modelnet40_test.txt`` the shapes of each split
(``modelnet10_...`` those of the ten-class subset).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import (
    LIST_BYTES,
    SHAPE_BYTES,
    digest_listing,
    digest_values,
    read_text,
    scan_files,
)
from sparsepipe.data.listing import Listing
from sparsepipe.data.mesh_rows import COUNTED_NUMBERS, FramedPoints, counted, first_points, quantise
from sparsepipe.data.points import SPLITS, FloatArray, PointSet, Split
from sparsepipe.data.sources.base import (
    CacheSettings,
    open_points,
    require_root,
    wrong_layout,
)
from sparsepipe.errors import DataError

WHERE_FROM = (
    "modelnet40_normal_resampled.zip is distributed with PointNet++ and its successors "
    "(made from ModelNet, https://modelnet.cs.princeton.edu, for research)"
)

_COLUMNS = 6


class NormalResampled:
    """Source: text files of points; the normals are not used.

    Args:
        root: directory with the class folders and the lists of shapes.
        subset: 40 for all classes, 10 for the ten-class subset.
    """

    takes_cached_points = True
    takes_first_points = True

    def __init__(self, root: Path | str | None, *, subset: int = 40) -> None:
        self.root = require_root(
            root, what="the directory modelnet40_normal_resampled", where_from=WHERE_FROM
        )
        self._prefix = f"modelnet{subset}"
        lists = ["shape_names", *SPLITS]
        if not all((self.root / f"{self._prefix}_{name}.txt").exists() for name in lists):
            raise wrong_layout(
                self.root,
                expected="class folders, "
                + ", ".join(f"{self._prefix}_{name}.txt" for name in lists),
            )

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The clouds of a split; see ``Source.load``."""
        return open_points(self.listing(split), TextPoints(cache.points), cache)

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of names, sizes and contents; see ``Source.fingerprint``."""
        digests = [
            digest_listing(
                scan_files(self.root, self.listing(split).names, cache_directory=cache.directory)
            )
            for split in SPLITS
        ]
        return digest_values([self._lines("shape_names"), *digests])

    def listing(self, split: Split) -> Listing:
        """The files of a split.

        Raises:
            DataError: a list is empty, or contains a shape of an unknown class.
        """
        classes = self._lines("shape_names")
        shapes = self._lines(split)
        numbers = {name: number for number, name in enumerate(classes)}
        owners = [shape.rpartition("_")[0] for shape in shapes]
        unknown = sorted(set(owners) - set(numbers))
        if unknown:
            raise DataError(
                f"{self.root}/{self._prefix}_{split}.txt names shapes of unknown classes: "
                f"{', '.join(unknown[:5])}",
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
            classes=tuple(classes),
        )

    def _lines(self, name: str) -> list[str]:
        path = self.root / f"{self._prefix}_{name}.txt"
        text = read_text(path, limit_bytes=LIST_BYTES)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            raise DataError(f"{path} is empty", remedy=f"unpack the archive again; {WHERE_FROM}")
        return lines


@dataclass(frozen=True, slots=True)
class TextPoints(FramedPoints):
    """The first points of a text file, quantised to the shape's box.

    Attributes:
        points: P, lines taken from each file; those of a file with fewer are repeated.
    """

    kind: ClassVar[str] = "text_points"
    meta_size: ClassVar[int] = COUNTED_NUMBERS
    points: int

    def settings(self) -> dict[str, Any]:
        """Everything besides the files that determines the rows."""
        return {"algorithm": "text 3", "points": self.points}

    def __call__(self, path: Path, digest: str) -> tuple[NDArray[np.uint16], FloatArray]:
        """Quantised points [P, 3] of one file; their frame, and how many points the file has.

        Raises:
            DataError: the file cannot be read, or is not a table of six columns.
        """
        del digest  # nothing is random here
        points_Q3 = _read_points(path)
        points_P3 = first_points(points_Q3, self.points)
        if not np.isfinite(points_P3).all():
            raise _corrupt(path, "it has coordinates that are not finite")
        rows = quantise(points_P3, points_P3.min(axis=0), points_P3.max(axis=0))
        return counted(*rows, len(points_Q3))


def _read_points(path: Path) -> NDArray[np.float64]:
    lines = read_text(path, limit_bytes=SHAPE_BYTES).split()
    try:
        values = np.array(",".join(lines).split(","), np.float64)
    except ValueError as error:
        raise _corrupt(path, str(error)) from error
    if not lines or len(values) != _COLUMNS * len(lines):
        raise _corrupt(path, f"its lines do not have {_COLUMNS} numbers x,y,z,nx,ny,nz each")
    return values.reshape(-1, _COLUMNS)[:, :3]


def _corrupt(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: {reason}",
        remedy="unpack the archive again, or use data=folder for other text files; the file is "
        "left out unless data.strict=true",
    )
