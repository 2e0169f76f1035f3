"""Files of volumes, opened so that a part can be read without the rest.

``.npy`` files, uncompressed ``.tif`` and ``.nii`` files and zarr arrays are read where they lie.
``.nii.gz`` files and compressed ``.tif`` files have to be decompressed from their beginning; they
are written to a ``.npy`` file once.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, new_array, unreadable
from sparsepipe.errors import DataError

SUFFIXES = (".npy", ".tif", ".tiff", ".nii", ".nii.gz", ".zarr")
_PACKAGES = {".tif": "tifffile", ".tiff": "tifffile", ".nii": "nibabel", ".nii.gz": "nibabel"}
_ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
_PIECE_BYTES = 1 << 23
_GZIP_RATIO = 1032
"""By which gzip compresses at most."""
_NUMBERS = "biuf"
"""Kinds of numpy types that are real numbers."""


class LazyArray(Protocol):
    """An array on the disk, of which slices are read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, part: tuple[slice, ...], /) -> Any: ...


def suffix_of(path: Path) -> str | None:
    """The suffix of a volume in one of ``SUFFIXES``; None for other files.

    An array within a zarr group has the suffix ``.zarr`` whatever its name.
    """
    found = [suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)]
    if found:
        return max(found, key=len)
    is_zarr = path.is_dir() and any((path / name).is_file() for name in _ZARR_FILES)
    return ".zarr" if is_zarr else None


def open_volume(path: Path) -> LazyArray:
    """The array of a volume whose parts can be read, see ``must_be_decompressed``.

    Raises:
        DataError: the file is missing, broken or of an unknown format, or its package is missing.
    """
    suffix = suffix_of(path)
    with explained(path):
        match suffix:
            case ".npy":
                array: LazyArray = np.load(path, mmap_mode="r", allow_pickle=False)
            case ".tif" | ".tiff":
                array = _package(path, "tifffile").memmap(path, mode="r")
            case ".nii":
                array = _package(path, "nibabel").load(path, mmap="r").dataobj
            case ".zarr":
                array = _open_zarr(path)
            case _:
                raise DataError(
                    f"{path} is of an unknown format",
                    remedy=f"convert it to one of {', '.join(SUFFIXES)}, or leave it out",
                )
    return _numeric(array, path)


def read_volume(path: Path, part: tuple[slice, ...]) -> NDArray[Any]:
    """A part of a volume, as stored; a memory map of it where the format allows.

    Raises:
        DataError: as ``open_volume``.
    """
    array = open_volume(path)
    with explained(path):
        return np.asarray(array[part])


def header_of(path: Path) -> tuple[int, ...]:
    """The shape of a volume, compressed or not.

    Raises:
        DataError: as ``open_volume``.
    """
    if not must_be_decompressed(path):
        return tuple(open_volume(path).shape)
    with explained(path):
        if suffix_of(path) == ".nii.gz":
            return tuple(_package(path, "nibabel").load(path).shape)
        with _package(path, "tifffile").TiffFile(path) as file:
            return tuple(file.series[0].shape)


def must_be_decompressed(path: Path) -> bool:
    """Whether no part can be read without the parts before it.

    Raises:
        DataError: a ``.tif`` file is missing or broken, or its package is missing.
    """
    suffix = suffix_of(path)
    if suffix not in (".tif", ".tiff"):
        return suffix == ".nii.gz"
    with explained(path), _package(path, "tifffile").TiffFile(path) as file:
        return file.series[0].dataoffset is None


def decompress(path: Path, target: Path) -> None:
    """Write a compressed volume to a ``.npy`` file, piece by piece.

    Raises:
        DataError: the file is missing or broken, its package is missing, or space is too little.
        OSError: the target cannot be written.
    """
    if suffix_of(path) == ".nii.gz":
        _decompress_nifti(path, target)
    else:
        _decompress_tiff(path, target)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn whatever a library raises about a file into an error with a remedy.

    Raises:
        DataError: the block failed.
    """
    try:
        if not path.is_dir():  # as zarr arrays are
            check_regular(path)
        yield
    except (DataError, MemoryError):
        raise
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.EMFILE, errno.ENFILE):
            raise unreadable(path, error) from error
        raise _broken(path, error) from error
    except Exception as error:  # each library has its own
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> DataError:
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "imagecodecs" in what:
        return DataError(
            f"{path} cannot be decompressed: {what}",
            remedy="pip install imagecodecs, or write the file without compression",
        )
    return DataError(
        f"{path} cannot be read as {suffix_of(path)}: {what}",
        remedy="write the file again, or leave it out",
    )


def _package(path: Path, name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise DataError(
            f"{path} needs the package {name}: {error}",
            remedy="pip install 'sparsepipe[volumes]', or convert the file to .npy",
        ) from error


def _open_zarr(path: Path) -> Any:
    zarr = _package(path, "zarr")
    array = zarr.open(path, mode="r")
    if isinstance(array, zarr.Array):
        return array
    arrays = sorted(name for name, _ in array.arrays())
    raise DataError(
        f"{path} is a group of zarr arrays ({', '.join(arrays[:6]) or 'none directly in it'})",
        remedy=f"name one of them in a csv file of paths, such as {path / (arrays or ['0'])[0]}",
    )


def _numeric(array: LazyArray, path: Path) -> LazyArray:
    if np.dtype(array.dtype).kind not in _NUMBERS:
        raise DataError(
            f"{path} has values of type {array.dtype}",
            remedy="write it with integers or floating-point numbers",
        )
    return array


def _decompress_nifti(path: Path, target: Path) -> None:
    """Slabs along the last dimension, whose positions lie farthest apart in such a file."""
    nibabel = _package(path, "nibabel")
    with explained(path):
        # Kept open, because each opening would decompress from the beginning.
        array = nibabel.load(path, keep_file_open=True).dataobj
        _numeric(array, path)
        promised = math.prod(array.shape) * np.dtype(array.dtype).itemsize
        if promised > max(_PIECE_BYTES, _GZIP_RATIO * path.stat().st_size):
            raise ValueError(f"its header promises the sizes {array.shape}, more than it can hold")
        scaled = (array.slope, array.inter) != (1, 0)
        dtype = np.dtype(np.float32) if scaled else array.dtype.newbyteorder("=")
        step = max(1, _PIECE_BYTES // (8 * math.prod(array.shape[:-1])))
    with new_array(target, dtype=dtype, shape=array.shape, fortran_order=True) as written:
        for first in range(0, array.shape[-1], step):
            slab = (..., slice(first, first + step))
            with explained(path):
                values = np.asarray(array[slab])
            written[slab] = values


def _decompress_tiff(path: Path, target: Path) -> None:
    """Page by page; tifffile decodes each into its place."""
    tifffile = _package(path, "tifffile")
    with ExitStack() as opened:
        with explained(path):
            series = opened.enter_context(tifffile.TiffFile(path)).series[0]
            dtype = _numeric(series, path).dtype.newbyteorder("=")
        with new_array(target, dtype=dtype, shape=series.shape) as written, explained(path):
            series.asarray(out=written)
