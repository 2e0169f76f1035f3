"""Meshes as OFF files in ModelNet's layout: ``<class>/<split>/<name>.off``."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from sparsepipe.data.files import digest_values, explaining_storage
from sparsepipe.data.manifest import digest_listing, scan_files
from sparsepipe.data.mesh_rows import SurfaceSampler, SurfaceVoxels
from sparsepipe.data.points import MappedArray, PointSet
from sparsepipe.data.rows import DONE
from sparsepipe.data.sources.base import (
    SPLITS,
    CacheSettings,
    Split,
    require_root,
    wrong_layout,
)
from sparsepipe.data.sources.listing import Listing, open_points, open_rows
from sparsepipe.data.voxels import Span
from sparsepipe.errors import DataError

_LOG = logging.getLogger(__name__)

WHERE_FROM = (
    "ModelNet10.zip and ModelNet40.zip are at https://modelnet.cs.princeton.edu "
    "(for research); unpack one and name the directory that holds its class folders"
)


class OffTree:
    """Source: OFF meshes, sampled once into a cache of points.

    Folders whose names begin with ``.`` or ``_`` (such as ``__MACOSX``) are no classes.

    Args:
        root: directory with one folder for each class.
    """

    takes_cached_points = True

    def __init__(self, root: Path | str | None) -> None:
        self.root = require_root(
            root, what="a tree of OFF meshes in ModelNet's layout", where_from=WHERE_FROM
        )

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The clouds of a split; see ``Source.load``."""
        return open_points(self.listing(split), _sampler(cache), cache)

    def load_surface(
        self, split: Split, cache: CacheSettings, *, resolution: int, span: Span
    ) -> MappedArray:
        """Packed bits [S, ceil(R^3 / 8)] of the voxels that each mesh's surface crosses.

        Rows are those of the split's ``PointSet``.

        Raises:
            DataError: see ``load``.
        """
        reader = SurfaceVoxels(_sampler(cache), resolution, span)
        rows = open_rows(self.listing(split), reader, cache)
        usable_S = self.load(split, cache).rows_S
        assert (rows.state_S()[usable_S] == DONE).all()
        return rows.rows

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of names, sizes and contents; see ``Source.fingerprint``."""
        names = [name for split in SPLITS for name in self._names(split)]
        return digest_values(
            digest_listing(scan_files(self.root, names, cache_directory=cache.directory))
        )

    def listing(self, split: Split) -> Listing:
        """The files of a split.

        Raises:
            DataError: the root has another layout, or a class has no mesh to train on.
        """
        classes = self._classes()
        files = {name: self._class_files(name, split) for name in classes}
        empty = [name for name in classes if not files[name]]
        if len(empty) == len(classes) or (empty and split == "train"):
            raise DataError(
                f"{self.root} has no {split} mesh of class {', '.join(empty)}",
                remedy=f"put OFF files into {self.root / empty[0] / split}, or remove the "
                "folders of classes that should not be there",
            )
        if empty:
            _LOG.warning("no %s mesh of class %s in %s", split, ", ".join(empty), self.root)
        counts = [len(files[name]) for name in classes]
        return Listing(
            root=self.root,
            split=split,
            names=tuple(name for of_class in files.values() for name in of_class),
            labels_S=np.repeat(np.arange(len(classes)), counts),
            classes=classes,
        )

    def _classes(self) -> tuple[str, ...]:
        with explaining_storage(self.root, setting="data.root"):
            folders = sorted(
                path
                for path in self.root.iterdir()
                if path.is_dir() and not path.name.startswith((".", "_"))
            )
        if not any((folder / split).is_dir() for folder in folders for split in SPLITS):
            raise wrong_layout(self.root, expected="<class>/train/*.off and <class>/test/*.off")
        return tuple(folder.name for folder in folders)

    def _class_files(self, class_name: str, split: Split) -> list[str]:
        folder = self.root / class_name / split
        if not folder.is_dir():
            return []
        with explaining_storage(folder, setting="data.root"):
            return sorted(
                f"{class_name}/{split}/{path.name}"
                for path in folder.iterdir()
                if path.suffix.lower() == ".off" and not path.name.startswith(".")
            )

    def _names(self, split: Split) -> list[str]:
        return [name for folder in self._classes() for name in self._class_files(folder, split)]


def _sampler(cache: CacheSettings) -> SurfaceSampler:
    return SurfaceSampler(cache.points, cache.seed)
