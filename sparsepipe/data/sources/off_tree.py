"""OFF files in ModelNet's layout (``<class>/<split>/<name>.off``), existing or generated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.files import (
    LOCK_WAIT_S,
    digest_listing,
    digest_values,
    explaining_storage,
    locked,
    scan_files,
)
from sparsepipe.data.listing import Listing, find_files, make_listing
from sparsepipe.data.points import SPLITS, MappedArray, Split
from sparsepipe.data.shape_rows import ShapeSampler, SurfaceVoxels
from sparsepipe.data.shapes import generate_shapes
from sparsepipe.data.shapes.generate import MODELLER_VERSION, is_complete, shapes_settings
from sparsepipe.data.sources.base import ListedShapes, open_rows, require_root, wrong_layout
from sparsepipe.data.voxels import Span
from sparsepipe.errors import ConfigError
from sparsepipe.utils.files import expanded
from sparsepipe.utils.host import usable_cores

WHERE_FROM = (
    "ModelNet10.zip and ModelNet40.zip are at https://modelnet.cs.princeton.edu "
    "(for research); unpack one and name the directory that holds its class folders"
)


class OffTree(ListedShapes):
    """Source: OFF meshes, from which points are sampled once into a cache.

    Folders whose names begin with ``.`` or ``_`` (such as ``__MACOSX``) are ignored.

    Args:
        root: directory with one folder for each class.
    """

    def __init__(self, root: Path | str | None) -> None:
        self.root = require_root(
            root, what="a tree of OFF meshes in ModelNet's layout", where_from=WHERE_FROM
        )

    def listing(self, split: Split) -> Listing:
        """The files of a split.

        Raises:
            DataError: the root has another layout, or a class has no training mesh.
        """
        found, _ = find_files(self.root, (".off",))
        placed = [file for file in found if file.class_name and file.split]
        if not placed:
            raise wrong_layout(self.root, expected="<class>/train/*.off and <class>/test/*.off")
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
        """Packed bits [S, ceil(R^3 / 8)] of the voxels that each mesh's surface crosses.

        The rows are numbered as in the split's ``PointSet``.

        Raises:
            DataError: see ``load``.
        """
        reader = SurfaceVoxels(ShapeSampler(cache.points, cache.seed), resolution, span)
        cached = open_rows(self.listing(split), reader, cache)
        assert np.isin(self.load(split, cache).rows_S, cached.usable_S).all()
        return cached.rows

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of names, sizes and content; see ``Source.fingerprint``."""
        names = [name for split in SPLITS for name in self.listing(split).names]
        files = scan_files(self.root, names, cache_directory=cache.directory)
        return digest_values(digest_listing(files))


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
        counts = {"train_per_class": train_per_class, "test_per_class": test_per_class}
        for name, value in counts.items():
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

    def listing(self, split: Split) -> Listing:
        """The files of a split; missing ones are generated."""
        # A complete set may be in a read-only directory, where no lock can be created.
        self._complete = self._complete or is_complete(self.root, self._settings)
        if not self._complete:
            with (
                explaining_storage(self.root, setting="data.root"),
                locked(self.root / ".lock", wait_s=LOCK_WAIT_S),
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
        return super().listing(split)
