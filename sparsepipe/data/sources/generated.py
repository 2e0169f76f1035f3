"""Procedurally modelled shapes: written as OFF files on first use, then read like any."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from sparsepipe.data.files import explaining_full_disk, usable_cores
from sparsepipe.data.lock import locked
from sparsepipe.data.sources.base import CacheSettings, Split
from sparsepipe.data.sources.listing import Listing
from sparsepipe.data.sources.off_tree import OffTree
from sparsepipe.errors import ConfigError

_LOCK_WAIT_S = 1_800.0


class GeneratedShapes(OffTree):
    """Source: the embedded classes of modelled objects, in ModelNet's layout.

    Each choice of counts and seed has a directory of its own under ``root``, so that a small
    set made for a demonstration is never taken for the full one.

    Args:
        root: directory to write into; made if it is missing.
        train_per_class: training shapes of each class.
        test_per_class: test shapes of each class.
        classes: names of classes to take; None is all.
        seed: seed of the shapes.

    Raises:
        ConfigError: no root is set, or a count is below 1.
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
        self._counts = (train_per_class, test_per_class)
        self._class_names = None if classes is None else tuple(classes)
        self._seed = seed
        name = f"train{train_per_class}_test{test_per_class}_seed{seed}"
        if classes is not None:
            name += "_" + "+".join(sorted(classes))
        home = Path(os.path.expandvars(root)).expanduser().absolute() / name
        with explaining_full_disk(home):
            home.mkdir(parents=True, exist_ok=True)
        super().__init__(home)
        self._complete = False

    def listing(self, split: Split) -> Listing:
        """The files of a split, generated where they are missing."""
        self._generate()
        return super().listing(split)

    def fingerprint(self, cache: CacheSettings) -> str:
        """Digest of the generated files; see ``Source.fingerprint``."""
        self._generate()
        return super().fingerprint(cache)

    def _generate(self) -> None:
        if self._complete:
            return
        from sparsepipe.data.shapes import generate_shapes  # loads every class's modeller

        train_per_class, test_per_class = self._counts
        lock = self.root / ".lock"
        with explaining_full_disk(self.root), locked(lock, wait_s=_LOCK_WAIT_S):
            generate_shapes(
                self.root,
                classes=self._class_names,
                train_per_class=train_per_class,
                test_per_class=test_per_class,
                seed=self._seed,
                workers=usable_cores(),
            )
        self._complete = True
