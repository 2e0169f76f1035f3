"""A user's own shapes in a folder, with or without folders of classes and splits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sparsepipe.data.formats import SHAPE_SUFFIXES
from sparsepipe.data.listing import Listing, list_folder
from sparsepipe.data.points import Split
from sparsepipe.data.sources.base import ListedShapes, Source, require_root
from sparsepipe.data.sources.npz import NpzBundle

_DOMAIN_SUFFIXES = (".npy", ".xyz", ".glb", ".obj", ".off", ".stl", ".ply")
"""Suffixes in folders of domains, where other text files and archives are not shapes."""


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
        DataError: the folder or csv file is missing, they do not fit together, or a class
            has no shape for training.
    """

    def __init__(
        self, root: Path | str | None, *, split: float | str | None = None, seed: int = 0
    ) -> None:
        self.root = require_root(
            root,
            what="a folder with a folder for each class",
            where_from=f"those hold files of {', '.join(SHAPE_SUFFIXES)}",
        )
        self._listings: Mapping[Split, Listing] = list_folder(
            self.root, suffixes=SHAPE_SUFFIXES, split=split, seed=seed, needs_classes=True
        )

    def listing(self, split: Split) -> Listing:
        """The files of a split."""
        return self._listings[split]


class ShapeFolder(ListedShapes):
    """Source: meshes and clouds in a folder, with or without folders of classes.

    Args:
        root: the folder.
        test_share: share of the files for testing, where no folders divide them.

    Raises:
        ConfigError: the share is out of its range.
        DataError: the folder is missing or has another layout.
    """

    def __init__(self, root: Path | str | None, *, test_share: float = 0.2) -> None:
        self.root = require_root(
            root,
            what="a folder of meshes or clouds",
            where_from=f"it holds files of {', '.join(_DOMAIN_SUFFIXES)}",
        )
        self._listings = list_folder(self.root, suffixes=_DOMAIN_SUFFIXES, share=test_share)

    def listing(self, split: Split) -> Listing:
        """The files of a split."""
        return self._listings[split]


def shape_folder(root: Path | str | None, *, test_share: float = 0.2) -> Source:
    """The source of a folder: ``train.npz`` and ``test.npz``, or a file for each shape.

    Arguments and errors as of :class:`ShapeFolder`.
    """
    if root is not None and (Path(root) / "train.npz").is_file():
        return NpzBundle(root, needs_labels=False)
    return ShapeFolder(root, test_share=test_share)
