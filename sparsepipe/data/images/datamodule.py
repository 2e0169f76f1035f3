"""LightningDataModule of images, and the source of images in a user's folder.

Shapes: B images in a batch, S images of a split, H x W pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch.utils.data import Dataset

from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.dataloaders import Access
from sparsepipe.data.datamodule import Purpose, Share, SplitDataModule
from sparsepipe.data.files import digest_file, digest_values, require_root
from sparsepipe.data.images.shifts import ImageShift
from sparsepipe.data.listing import list_folder
from sparsepipe.data.points import SPLITS, IntArray, MappedArray, Split
from sparsepipe.data.sources.listed import open_rows
from sparsepipe.errors import ConfigError, DataError
from sparsepipe.utils.arguments import Count, CountFrom0, Seed, checked
from sparsepipe.utils.files import expanded

DIGITS = tuple("0123456789")
_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MODES = {1: "L", 3: "RGB"}
_WIDE = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits, which a conversion would clip."""


@dataclass(frozen=True, slots=True)
class ImageSet:
    """Images of one split.

    Attributes:
        images: uint8 [S, H, W], or [S, H, W, C] with colours, in memory or memory-mapped; digits
            are 28 x 28.
        labels_S: int64 [S], class numbers (for digits, the digit); -1 for images without a label.
        files: path of each image's file; empty where images share files.
    """

    images: NDArray[Any] | MappedArray
    labels_S: NDArray[np.int64]
    files: tuple[str, ...] = ()

    def image(self, index: int) -> NDArray[np.float32]:
        """Returns one image, float32 [C, H, W] in [0, 1]."""
        images = self.images.array if isinstance(self.images, MappedArray) else self.images
        image = images[index][None] if images.ndim == 3 else images[index].transpose(2, 0, 1)
        scaled: NDArray[np.float32] = image.astype(np.float32) / np.float32(255)
        return scaled


class ImageDataModule(SplitDataModule):
    """Data module of images, such as digits, for training, validation and test.

    A batch is ``dict(input=Tensor [B, C, H, W] in [0, 1], label=[B], index=[B])``, where C is set
    by ``shift``, or else by the source; ``index`` is the image's position in its split.

    Args:
        root: directory of the data, if the source reads files.
        source: class (or partial) called with ``root``. A source has ``load(split, cache_dir)``,
            which returns an :class:`ImageSet`, ``fingerprint()``, a digest of the images, and
            ``classes``, the names of their classes (without it: the digits 0 to 9).
        cache_dir: directory in which drawn or resized images are cached.
        shift: shift that turns the images into those of another domain, if any.
        batch_size: as in ``ShapeDataModule``, like the arguments after it.
    """

    input_kind = "dense 2D"
    """Kind of the inputs."""

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        source: Callable[[Path | str | None], Any],
        cache_dir: Path | str,
        shift: ImageShift | None = None,
        batch_size: Count = 32,
        num_workers: CountFrom0 | None = None,
        val_share: Share = 0.0,
        seed: Seed = 0,
    ) -> None:
        super().__init__(
            batch_size=batch_size, num_workers=num_workers, val_share=val_share, seed=seed
        )
        self._source = source(root)
        self.classes: tuple[str, ...] = getattr(self._source, "classes", DIGITS)
        """Class names, indexed by the labels."""
        self._shift = shift
        self._cache = expanded(cache_dir).absolute()

    @property
    def in_channels(self) -> int:
        """C, the number of channels of an image, after ``shift``."""
        return len(self._dataset("train", np.zeros(1, np.int64))[0]["input"])

    def _load(self, split: Split) -> ImageSet:
        images: ImageSet = self._source.load(split, self._cache)
        return images

    def _dataset(self, purpose: Purpose, indices_S: IntArray) -> ImageDataset:
        split: Split = "test" if purpose == "test" else "train"
        return ImageDataset(self.samples(split), indices_S, shift=self._shift, split=split)


class ImageDataset(Dataset[dict[str, Any]]):
    """Images at ``indices_S`` of a split, read by (epoch, position there); the epoch is ignored."""

    def __init__(
        self, images: ImageSet, indices_S: IntArray, *, shift: ImageShift | None, split: Split
    ) -> None:
        self.images, self.indices_S = images, indices_S
        self._shift, self._split = shift, SPLITS.index(split)

    def __len__(self) -> int:
        return len(self.indices_S)

    def __getitem__(self, access: Access | int) -> dict[str, Any]:
        """Returns ``label``, ``index`` and ``input``, float32 [C, H, W]."""
        position = access[1] if isinstance(access, tuple) else access
        index = int(self.indices_S[position])
        label, image = int(self.images.labels_S[index]), self.images.image(index)
        if self._shift is not None:
            image = self._shift(image, split=self._split, index=index)
        return {"label": label, "index": index, "input": image}


@dataclass(frozen=True, slots=True)
class _ResizedImage:
    """Reads an image for the cache, turned upright (as its EXIF data say) and resized."""

    kind: ClassVar[str] = "image_folders"
    dtype: ClassVar[str] = "|u1"
    meta_size: ClassVar[int] = 0
    size: tuple[int, ...]
    channels: int

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a cached image: [H, W], or [H, W, C] with colours."""
        return (*self.size, *((self.channels,) if self.channels > 1 else ()))

    def settings(self) -> dict[str, Any]:
        """Returns the settings that, with an image's file, determine its cached pixels."""
        return {"algorithm": "bilinear 2", "size": self.size, "channels": self.channels}

    def __call__(self, path: Path, digest: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        del digest  # nothing is random
        with Image.open(path) as image:
            if image.mode.startswith(_WIDE):
                raise DataError(
                    f"{path} has more than 8 bits per channel ({image.mode})",
                    remedy="convert it to 8 bits per channel",
                )
            frames, size = getattr(image, "n_frames", 1), image.size
            if frames > 1 and image.format != "MPO":  # photos of cameras
                image.seek(frames - 1)
                if image.size == size:  # smaller ones are previews
                    raise DataError(
                        f"{path} has {frames} images, of which the first alone would be read",
                        remedy="write each image to a file of its own",
                    )
                image.seek(0)
            upright = ImageOps.exif_transpose(image).convert(_MODES[self.channels])
        height, width = self.size
        pixels = np.asarray(upright.resize((width, height), Image.Resampling.BILINEAR))
        return pixels, np.empty(0, np.float32)


class ImageFolder:
    """Source: images in a folder, with the layout of :func:`sparsepipe.data.listing.list_folder`.

    Args:
        root: the folder.
        size: H and W to which images are resized, regardless of their proportions.
        channels: C, 1 for grey or 3 for colours.
        test_share: share of each class for testing, unless folders train and test divide the files.

    Attributes:
        classes: names of the classes; empty without labels.
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
            root, what="a folder of images", where_from=f"images are {', '.join(_SUFFIXES)}"
        )
        if len(size) != 2 or channels not in _MODES:
            raise ConfigError(
                f"size={list(size)} and channels={channels} of images are not valid",
                remedy="set size to a height and a width, and channels to 1 (grey) or 3 (colours)",
            )
        self._reader = _ResizedImage(tuple(size), channels)
        self._listings = list_folder(self.root, suffixes=_SUFFIXES, share=test_share)
        self.classes = self._listings["train"].classes

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """Returns a split's images; raises a DataError if any of them cannot be read."""
        listing = self._listings[split]
        settings = CacheSettings(directory=cache_directory, strict=True)
        rows = open_rows(listing, self._reader, settings).rows
        files = tuple(str(self.root / name) for name in listing.names)
        return ImageSet(rows, listing.labels_S, files)

    def fingerprint(self) -> str:
        """Hex digest of the files' names and contents."""
        names = [name for split in SPLITS for name in self._listings[split].names]
        return digest_values([[name, digest_file(self.root / name)] for name in names])
