"""Procedurally modelled shapes: written as OFF files on first use, then read like any."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sparsepipe.data.files import explaining_storage
from sparsepipe.data.lock import locked
from sparsepipe.data.points import PointSet
from sparsepipe.data.shapes import generate_shapes
from sparsepipe.data.shapes.generate import MODELLER_VERSION, is_complete, shapes_settings
from sparsepipe.data.sources.base import LOCK_WAIT_S, CacheSettings, Split
from sparsepipe.data.sources.listing import Listing
from sparsepipe.data.sources.off_tree import OffTree
from sparsepipe.errors import ConfigError
from sparsepipe.utils.host import usable_cores


class GeneratedShapes(OffTree):
    """Source: the embedded classes of modelled objects, in ModelNet's layout.

    Each choice of counts and seed, and each version of the modeller, has a directory of its
    own under ``root``, so that a small set made for a demonstration is never taken for the
    full one, nor an old one for a new one.

    Args:
        root: directory to write into; made if it is missing.
        train_per_class: training shapes of each class.
        test_per_class: test shapes of each class.
        classes: names of classes to take; None is all.
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
        self.root = Path(os.path.expandvars(root)).expanduser().absolute() / name
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
        """The files of a split, generated where they are missing."""
        self._generate(LOCK_WAIT_S)
        return super().listing(split)

    def _generate(self, lock_wait_s: float) -> None:
        # A set that is whole may lie where nothing can be written, not even a lock.
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
