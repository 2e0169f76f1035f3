"""What a source of point clouds is, and the checks that all of them share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sparsepipe.data.checks import check_numbers
from sparsepipe.data.points import SPLITS, PointSet, Split
from sparsepipe.errors import DataError

__all__ = [
    "LOCK_WAIT_S",
    "SPLITS",
    "CacheSettings",
    "Source",
    "Split",
    "require_root",
    "wrong_layout",
]

LOCK_WAIT_S = 7_200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """How a source prepares and keeps what is read at each access.

    Attributes:
        directory: where caches live; safe to delete, they are built again.
        points: points sampled from each mesh.
        seed: seed of the sampling.
        strict: refuse corrupt files instead of leaving them out.
        workers: processes that build a cache; 0 is one for each core.
        lock_wait_s: how long to wait for another process that builds the same cache.

    Raises:
        ConfigError: a number is too small; told by its key of the configuration.
    """

    directory: Path
    points: int = 16_384
    seed: int = 0
    strict: bool = False
    workers: int = 0
    lock_wait_s: float = LOCK_WAIT_S

    def __post_init__(self) -> None:
        check_numbers(
            least_1={"cached_points": self.points},
            least_0={"cache_workers": self.workers, "sampling_seed": self.seed},
        )


class Source(Protocol):
    """A place that point clouds come from, for both splits.

    Two things more a source may have: ``takes_cached_points = True`` where every shape gets
    ``CacheSettings.points`` points, so that wrong settings are told before a cache is built,
    and ``load_surface`` where there are meshes, see ``OffTree``.
    """

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The point clouds of a split, built into the cache first where needed.

        Raises:
            DataError: the root is missing, has another layout or holds no usable shape.
        """
        ...

    def fingerprint(self, cache: CacheSettings) -> str:
        """Hex digest of what the root holds, the same wherever it lies on the disk."""
        ...


def require_root(root: Path | str | None, *, what: str, where_from: str) -> Path:
    """The root as an absolute path.

    Args:
        root: what the user set as ``data.root``.
        what: the layout expected, for the message.
        where_from: where to get such data, for the remedy.

    Raises:
        DataError: no root is set, or it is not a directory.
    """
    if root is None or str(root) == "":
        raise DataError(
            f"data.root is not set; it should name {what}",
            remedy=f"set data.root=/path/to/it; {where_from}",
        )
    path = Path(os.path.expandvars(root)).expanduser().absolute()
    if not path.is_dir():
        raise DataError(
            f"data.root={root} is not a directory; it should be {what}",
            remedy=f"set data.root to an existing directory; {where_from}",
        )
    return path


def wrong_layout(root: Path, *, expected: str) -> DataError:
    """The error for a root of another layout, naming what lies there and the group that fits."""
    found = sorted(entry.name + "/" * entry.is_dir() for entry in root.iterdir())
    listing = ", ".join(found[:6]) + (f" and {len(found) - 6} more" if len(found) > 6 else "")
    return DataError(
        f"data.root={root} should hold {expected}, but holds {listing or 'nothing'}",
        remedy=_hint(root, expected),
    )


def _hint(root: Path, expected: str) -> str:
    """What a root of another layout was probably meant to be."""
    fitting = _fitting_group(root)
    if fitting:
        return f"use data={fitting}, which reads this layout"
    for inner in sorted(path for path in root.iterdir() if path.is_dir()):
        if fitting := _fitting_group(inner):
            return f"set data.root={inner} (with data={fitting})"
    return f"set data.root to the directory that holds {expected}"


def _fitting_group(root: Path) -> str | None:
    """The data group whose layout a directory seems to have."""
    if (root / "train.npz").is_file() or (root / "test.npz").is_file():
        return "modelnet40_points"
    if any(root.glob("modelnet*_shape_names.txt")):
        return "modelnet40_normal_resampled"
    classes = {path.parent.parent.name for path in root.glob("*/train/*.off")}
    if classes:
        return "modelnet10" if len(classes) <= 10 else "modelnet40"
    return None
