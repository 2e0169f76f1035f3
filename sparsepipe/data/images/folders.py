"""Images in a user's folder, resized once into the cache.

Shapes: S images of a split, H x W pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from sparsepipe.data.files import (
    LOCK_WAIT_S,
    digest_file,
    digest_listing,
    digest_values,
    explaining_storage,
    locked,
    new_array,
    scan_files,
    unreadable,
)
from sparsepipe.data.images.sources import ImageSet
from sparsepipe.data.listing import list_folder
from sparsepipe.data.points import SPLITS, MappedArray, Split
from sparsepipe.data.sources.base import require_root
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.arguments import Count, checked

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_VERSION = 1
"""Increased with any change to the content of the cache."""
_MODES = {1: "L", 3: "RGB"}
_WIDE = ("I", "F")
"""First letters of pillow's modes of more than 8 bits, which it would cut off."""


class ImageFolder:
    """Source: images in a folder, see :func:`sparsepipe.data.listing.list_folder`.

    Args:
        root: the folder.
        size: H and W that images are resized to, whatever their proportions.
        channels: C, 1 for grey or 3 for colours.
        test_share: share of the files for testing; only without folders of a split.

    Attributes:
        classes: names of the classes; none without labels.

    Raises:
        ConfigError: a setting is out of its range.
        DataError: no such folder exists, or it has another layout.
    """

    @checked
    def __init__(
        self,
        root: Path | str | None,
        *,
        size: Sequence[Count] = (28, 28),
        channels: int = 3,
        test_share: float = 0.2,
    ) -> None:
        self.root = require_root(
            root, what="a folder of images", where_from=f"images are {', '.join(SUFFIXES)}"
        )
        if len(size) != 2 or channels not in _MODES:
            raise ConfigError(
                f"size={list(size)} and channels={channels} of images are not valid",
                remedy="give a height and a width, and 1 channel (grey) or 3 (colours)",
            )
        self._size, self._channels = tuple(size), channels
        self._listings = list_folder(self.root, suffixes=SUFFIXES, share=test_share)
        self.classes = self._listings["train"].classes

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """The images of a split; see ``ImageSource.load``."""
        listing = self._listings[split]
        files = scan_files(self.root, listing.names, cache_directory=cache_directory)
        digest = digest_values([_VERSION, digest_listing(files), self._size, self._channels])
        path = cache_directory / "image_folders" / f"{digest}.npy"
        if not path.is_file():
            with (
                explaining_storage(cache_directory, setting="data.cache_dir"),
                locked(path.with_suffix(".lock"), wait_s=LOCK_WAIT_S),
            ):
                if not path.is_file():
                    self._write_images(path, [file.path for file in files])
        names = tuple(str(file.path) for file in files)
        return ImageSet(MappedArray(path), listing.labels_S, names)

    def fingerprint(self) -> str:
        """Digest of names and contents; see ``ImageSource.fingerprint``."""
        names = [name for split in SPLITS for name in self._listings[split].names]
        return digest_values([[name, digest_file(self.root / name)] for name in names])

    def _write_images(self, path: Path, files: Sequence[Path]) -> None:
        shape = (len(files), *self._size, *((self._channels,) if self._channels > 1 else ()))
        with new_array(path, dtype="u1", shape=shape) as images:
            for number, file in enumerate(files):
                images[number] = self._read_image(file)

    def _read_image(self, path: Path) -> NDArray[np.uint8]:
        """One image [H, W] or [H, W, C], the right way up."""
        try:
            with Image.open(path) as image:
                if image.mode.startswith(_WIDE):
                    raise DataError(
                        f"{path} has more than 8 bits a channel ({image.mode})",
                        remedy="convert it to 8 bits",
                    )
                upright = ImageOps.exif_transpose(image).convert(_MODES[self._channels])
        except DataError:
            raise
        except Exception as error:  # each format's reader has its own
            if isinstance(error, OSError) and error.errno:
                raise unreadable(path, error) from error
            raise DataError(
                f"{path} is not an image: {error}", remedy="write the file again, or remove it"
            ) from error
        height, width = self._size
        return np.asarray(upright.resize((width, height), Image.Resampling.BILINEAR))
