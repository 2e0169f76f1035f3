"""OFF files in ModelNet's layout (``<class>/<split>/<name>.off``), existing or generated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparsepipe.data.files import (
    digest_listing,
    digest_values,
    explaining_storage,
    locked,
    scan_files,
)
from sparsepipe.data.listing import Listing
from sparsepipe.data.mesh_rows import SurfaceSampler, SurfaceVoxels
from sparsepipe.data.points import SPLITS, MappedArray, PointSet, Split
from sparsepipe.data.row_cache import DONE
from sparsepipe.data.shapes import generate_shapes
from sparsepipe.data.shapes.generate import MODELLER_VERSION, is_complete, shapes_settings
from sparsepipe.data.sources.base import (
    LOCK_WAIT_S,
    CacheSettings,
    open_points,
    open_rows,
    require_root,
    wrong_layout,
)
from sparsepipe.data.voxels import Span
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.files import expanded
from sparsepipe.utils.host import usable_cores

_LOG = logging.getLogger(__name__)


WHERE_FROM = (
    "ModelNet10.zip and ModelNet40.zip are at https://modelnet.cs.princeton.edu "
    "(for research); unpack one and name the directory that holds its class folders"
)


class OffTree:
    """Source: OFF meshes, from which points are sampled once into a cache.

    Folders whose names begin with ``.`` or ``_`` (such as ``__MACOSX``) are ignored.

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

        The rows are numbered as in the split's ``PointSet``.

        Raises:
            DataError: see ``load``.
        """
        reader = SurfaceVoxels(_sampler(cache), resolution, span)
        rows = open_rows(self.listing(split), reader, cache)
        usable_S = self.load(split, cache).rows_S
        assert (rows.state_S()[usable_S] == DONE).all()
        return rows.rows

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of names, sizes and content; see ``Source.fingerprint``."""
        names = [name for split in SPLITS for name in self._names(split)]
        return digest_values(
            digest_listing(scan_files(self.root, names, cache_directory=cache.directory))
        )

    def listing(self, split: Split) -> Listing:
        """The files of a split.

        Raises:
            DataError: the root has another layout, or a class has no training mesh.
        """
        classes = self._classes()
        files = {name: self._class_files(name, split) for name in classes}
        empty = [name for name in classes if not files[name]]
        if len(empty) == len(classes) or (empty and split == "train"):
            raise DataError(
                f"{self.root} has no {split} mesh of class {', '.join(empty)}",
                remedy=f"put OFF files into {self.root / empty[0] / split}, or remove the "
                "folders of classes that should not be there; data=folder reads meshes and clouds "
                "of other formats",
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


class GeneratedShapes(OffTree):
    """Source: procedurally generated objects of the embedded classes, in ModelNet's layout.

    Each combination of counts and seed, and each version of the generator, has its own directory
    under ``root``, so that a small set for a demonstration is never mistaken for the full one,
    nor an old set for a new one.

    Args:
        root: directory to write to; created if it is missing.
        train_per_class: training shapes of each class.
        test_per_class: test shapes of each class.
        classes: names of the classes; None is all.
        seed: seed of the shapes.

    Raises:
        ConfigError: no root is set, a count is below 1 or a class is unknown.
    """

    def __init__(
        self,
        root: Path | str | None,
        *,
        train_per_class: int = 200,
        test_per_class: int = 52,
        classes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("train_per_class", train_per_class),
            ("test_per_class", test_per_class),
        ):
            if value < 1:
                raise ConfigError(
                    f"data.source.{name}={value} is too small",
                    remedy=f"set data.source.{name} to 1 or more",
                )
        if root is None or str(root) == "":
            raise ConfigError(
                "data.root is not set", remedy="set data.root to a directory to write shapes into"
            )
        self._settings = shapes_settings(classes, train_per_class, test_per_class, seed)
        name = f"v{MODELLER_VERSION}_train{train_per_class}_test{test_per_class}_seed{seed}"
        if classes is not None:
            name += "_" + "+".join(self._settings.classes)
        self.root = expanded(root).absolute() / name
        self._complete = False

    def load(self, split: Split, cache: CacheSettings) -> PointSet:
        """The clouds of a split; see ``Source.load``."""
        self._generate(cache.lock_wait_s)
        return super().load(split, cache)

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of the generated files; see ``Source.fingerprint``."""
        self._generate(cache.lock_wait_s)
        return super().fingerprint(cache)

    def listing(self, split: Split) -> Listing:
        """The files of a split; missing ones are generated."""
        self._generate(LOCK_WAIT_S)
        return super().listing(split)

    def _generate(self, lock_wait_s: float) -> None:
        # A complete set may be in a read-only directory, where no lock can be created.
        self._complete = self._complete or is_complete(self.root, self._settings)
        if self._complete:
            return
        with (
            explaining_storage(self.root, setting="data.root"),
            locked(self.root / ".lock", wait_s=lock_wait_s),
        ):
            generate_shapes(
                self.root,
                classes=self._settings.classes,
                train_per_class=self._settings.train_per_class,
                test_per_class=self._settings.test_per_class,
                seed=self._settings.seed,
                workers=usable_cores(),
            )
        self._complete = True
