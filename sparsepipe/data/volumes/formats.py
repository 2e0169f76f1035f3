"""Formats of volume files: some can be read in parts, the others are converted once.

``.npy`` and ``.h5`` files and zarr arrays are read in parts directly. ``.tif``, ``.nii`` and
``.nii.gz`` files are decompressed into a ``.npy`` file in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, new_array, unreadable
from sparsepipe.errors import DataError

CONVERTED = (".tif", ".tiff", ".nii", ".nii.gz")
"""Suffixes of files that are decompressed into the cache."""
SUFFIXES = (".npy", ".h5", ".hdf5", ".zarr", *CONVERTED)
_ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")


def suffix_of(path: Path) -> str:
    """Returns which of ``SUFFIXES`` a volume has; ``.zarr`` for zarr directories without one."""
    found = [suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)]
    if found:
        return max(found, key=len)
    if path.is_dir() and any((path / name).is_file() for name in _ZARR_FILES):
        return ".zarr"
    raise DataError(
        f"{path} has none of the suffixes {', '.join(SUFFIXES)}",
        remedy="convert it to one of these formats, or leave it out",
    )


@contextmanager
def open_volume(path: Path) -> Iterator[Any]:
    """Yields an array whose slices are read from a file of a format that is not ``CONVERTED``."""
    with _explained(path):
        match suffix_of(path):
            case ".npy":
                yield _numeric(np.load(path, mmap_mode="r", allow_pickle=False))
            case ".zarr":
                zarr = import_module("zarr")
                array = zarr.open(path, mode="r")
                if not isinstance(array, zarr.Array):
                    names = ", ".join(sorted(name for name, _ in array.arrays())[:6])
                    raise ValueError(
                        f"it is a group: list one of its arrays in a csv file ({names or 'none'})"
                    )
                yield _numeric(array)
            case _:
                with import_module("h5py").File(path, "r") as file:
                    arrays = [each for each in file.values() if hasattr(each, "shape")]
                    if len(arrays) != 1:
                        raise ValueError(f"it has {len(arrays)} arrays, not one: {', '.join(file)}")
                    yield _numeric(arrays[0])


def decompress(path: Path, target: Path) -> None:
    """Writes a volume with a suffix of ``CONVERTED`` to the ``.npy`` file ``target``.

    Raises:
        DataError: the file is missing or broken, or the package that reads it is missing.
        OSError: the target cannot be written, or the disk is full.
    """
    with _explained(path):
        if suffix_of(path) in (".tif", ".tiff"):
            values: NDArray[Any] = _numeric(import_module("tifffile").imread(path))
        else:
            stored = import_module("nibabel").load(path).dataobj
            values = np.asarray(_numeric(stored))
            if (stored.slope, stored.inter) != (1, 0):
                values = values.astype(np.float32)
    with new_array(target, dtype=values.dtype.newbyteorder("="), shape=values.shape) as written:
        written[...] = values


def _numeric(array: Any) -> Any:
    if np.dtype(array.dtype).kind not in "biuf":
        raise ValueError(f"it has values of type {array.dtype}, not real numbers")
    return array


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        if not path.is_dir():  # as zarr arrays are
            check_regular(path)
        yield
    except (DataError, MemoryError):
        raise
    except PermissionError as error:
        raise unreadable(path, error) from error
    except ImportError as error:
        raise DataError(
            f"{path} needs the package {error.name}: {error}",
            remedy="run pip install 'sparsepipe[volumes]', or convert the file to .npy",
        ) from error
    except Exception as error:  # each library raises its own types
        raise DataError(
            f"{path} cannot be read as {suffix_of(path)}: {str(error) or type(error).__name__}",
            remedy="write the file again, without compression, or leave it out",
        ) from error
