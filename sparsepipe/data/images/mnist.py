"""MNIST as its authors distribute it (idx), or as Kaggle does (train.csv). Nothing is downloaded.

Shapes: S images, 28 rows of 28 pixels.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.checks import check_numbers
from sparsepipe.data.files import digest_file, digest_values, unreadable
from sparsepipe.data.images.base import SIDE, ImageSet
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.data.sources.base import require_root
from sparsepipe.errors import ConfigError, DataError

WHERE_FROM = (
    "it holds either train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte (with or without .gz), or train.csv of Kaggle's Digit Recognizer"
)
_NAMES = {"train": "train", "test": "t10k"}
_IMAGES, _LABELS = ("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1)
"""What a file is called, and its dimensions."""
_CSV = "train.csv"


class Mnist:
    """Source: the four idx files, or the train.csv of Kaggle (42,000 rows: label, 784 pixels).

    Args:
        root: directory of the files; idx files count where it has both.
        train_images: how many to train on, the first ones; None is all. Zhang and Sun have 42,000,
            as train.csv has.
        held_out: rows at the end of train.csv that are tested on and not trained on; it has no
            test images with labels. The idx files have.

    Raises:
        ConfigError: a number is too small, or rows of idx files are to be held out.
        DataError: no root is set, or it holds neither.
    """

    def __init__(
        self, root: Path | str | None, *, train_images: int | None = None, held_out: int = 0
    ) -> None:
        check_numbers(
            least_1={"source.train_images": train_images}, least_0={"source.held_out": held_out}
        )
        self.root = require_root(root, what="the directory of MNIST", where_from=WHERE_FROM)
        self._train_images, self._held_out = train_images, held_out
        self._files = self._found()
        if held_out and not self._is_csv:
            raise ConfigError(
                f"data.source.held_out={held_out}, and {self.root} has the idx files of MNIST, "
                "which are tested on images of their own",
                remedy="set data.source.held_out=0; for fewer images to train on set "
                f"data.source.train_images, or data.root to a directory with {_CSV} alone",
            )
        self._rows: tuple[NDArray[np.uint8], NDArray[np.int64]] | None = None

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """The images of a split; see ``ImageSource.load``.

        Raises:
            ConfigError: more images are asked for than there are.
        """
        del cache_directory  # the files are small: each process reads them itself, once
        images, labels_S = self._csv(split) if self._is_csv else self._idx(split)
        if split == "test" or self._train_images is None:
            return ImageSet(images, labels_S)
        if self._train_images > len(labels_S):
            raise ConfigError(
                f"data.source.train_images={self._train_images}, and there are {len(labels_S)}",
                remedy=f"set it to {len(labels_S)} or less, or to null for all",
            )
        return ImageSet(images[: self._train_images], labels_S[: self._train_images])

    def fingerprint(self) -> str:
        """Digest of the files; see ``ImageSource.fingerprint``."""
        return digest_values([digest_file(path) for path in self._files])

    @property
    def _is_csv(self) -> bool:
        return len(self._files) == 1

    def _found(self) -> tuple[Path, ...]:
        idx = [self._idx_file(split, kind) for split in SPLITS for kind, _ in (_IMAGES, _LABELS)]
        there = [path for path in idx if path is not None]
        if len(there) == len(idx):
            return tuple(there)
        if (self.root / _CSV).is_file():
            return (self.root / _CSV,)
        raise DataError(
            f"data.root={self.root} holds {len(there)} of the four idx files of MNIST, and no "
            f"{_CSV}",
            remedy=f"set data.root to the directory of MNIST: {WHERE_FROM}; or draw digits with "
            "data=digits",
        )

    def _idx_file(self, split: Split, kind: str) -> Path | None:
        name = f"{_NAMES[split]}-{kind}"
        # Some mirrors have a dot before idx.
        names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
        return next((path for path in map(self.root.joinpath, names) if path.is_file()), None)

    def _idx(self, split: Split) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        first = 2 * SPLITS.index(split)
        images_path, labels_path = self._files[first : first + 2]
        images, labels_S = (
            read_idx(path, dimensions=dimensions)
            for path, (_, dimensions) in ((images_path, _IMAGES), (labels_path, _LABELS))
        )
        if images.shape[1:] != (SIDE, SIDE) or len(images) != len(labels_S):
            raise _broken(
                images_path, f"{images.shape} pixels for the {len(labels_S)} labels beside it"
            )
        return images, labels_S.astype(np.int64)

    def _csv(self, split: Split) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        if self._rows is None:
            self._rows = read_csv(self._files[0])
        images, labels_S = self._rows
        if self._held_out >= len(labels_S):
            raise ConfigError(
                f"data.source.held_out={self._held_out}, and {_CSV} has {len(labels_S)} rows",
                remedy="hold out fewer, so that some are left to train on",
            )
        end = len(labels_S) - self._held_out
        kept = slice(0, end) if split == "train" else slice(end, None)
        return images[kept], labels_S[kept]


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """The numbers of an idx file, gzipped or not.

    The format: two zero bytes, 8 for unsigned bytes, the number of dimensions, each of them as four
    bytes with the highest first, and the numbers.

    Raises:
        DataError: it cannot be read, or is none of so many dimensions.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise _broken(path, str(error)) from error
    head = 4 + 4 * dimensions
    if len(raw) < head or raw[:4] != bytes([0, 0, 8, dimensions]):
        raise _broken(path, f"it is no idx file of {dimensions} dimensions")
    shape = np.frombuffer(raw, ">u4", count=dimensions, offset=4).astype(int)
    if len(raw) != head + shape.prod():
        raise _broken(path, f"{len(raw) - head:,} bytes where {shape.prod():,} are announced")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def read_csv(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels of a train.csv of Kaggle: a head, and in each row a label and 784 pixels.

    Raises:
        DataError: it cannot be read, or has other columns or values.
    """
    try:
        # Of 16 bits: each rank reads them all.
        values: NDArray[Any] = np.loadtxt(path, np.int16, delimiter=",", skiprows=1, ndmin=2)
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError as error:
        raise _broken(path, str(error).splitlines()[0]) from error
    if values.shape[1] != 1 + SIDE**2:
        raise _broken(path, f"{values.shape[1]} columns, not a label and {SIDE**2} pixels")
    labels_S, pixels = values[:, 0], values[:, 1:]
    if pixels.min() < 0 or pixels.max() > 255 or labels_S.min() < 0 or labels_S.max() > 9:
        raise _broken(path, "labels are to be from 0 to 9, pixels from 0 to 255")
    return pixels.reshape(-1, SIDE, SIDE).astype(np.uint8), labels_S.astype(np.int64)


def _broken(path: Path, why: str) -> DataError:
    return DataError(f"{path}: {why}", remedy=f"get MNIST again; {WHERE_FROM}")
