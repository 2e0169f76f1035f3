"""Arrays of npz archives: zip files of an ``.npy`` file for each array, which has type and shape.

Before an array is read, its header is compared with what there is. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import math
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular
from sparsepipe.errors import SparsePipeError

LIMIT_BYTES = 1 << 30
"""Of an array that is read into memory."""
_RATIO, _SMALL_BYTES = 100, 1 << 26
"""Coordinates that were measured are not compressed by more; what is small may be."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


class NpzFile:
    """An open archive.

    Attributes:
        names: of the arrays.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path, self._archive = path, archive
        self._members = {
            info.filename.removesuffix(".npy"): info
            for info in archive.infolist()
            if info.filename.endswith(".npy")
        }
        self.names = frozenset(self._members)

    def read(self, name: str) -> NDArray[Any]:
        """An array in memory.

        Raises:
            ValueError: see :func:`open_npz`; or it is larger than 1 GiB.
        """
        info = self._checked(name)
        if info.file_size > LIMIT_BYTES:
            raise ValueError(f"its array {name} has {_size(info.file_size)}")
        with self._archive.open(info) as member:
            return np.asarray(npy.read_array(member, allow_pickle=False))

    def unpack(self, name: str, target: Path) -> None:
        """Write an array into an ``.npy`` file, piece by piece.

        Raises:
            ValueError: see :func:`open_npz`.
            OSError: the target cannot be written.
        """
        info = self._checked(name)
        with self._archive.open(info) as member, target.open("wb") as file:
            shutil.copyfileobj(member, file, 1 << 20)

    def _checked(self, name: str) -> zipfile.ZipInfo:
        """The member of an array that is as long as its header promises."""
        info = self._members[name]
        if info.flag_bits & 1:
            raise ValueError(f"its array {name} is encrypted")
        if info.compress_type not in _METHODS:
            raise ValueError(
                f"its array {name} is compressed by a method of the number {info.compress_type}, "
                "which is unknown"
            )
        if info.compress_size > self._path.stat().st_size:
            raise ValueError(f"the end of its array {name} is missing")
        if info.file_size > max(_SMALL_BYTES, _RATIO * info.compress_size):
            raise ValueError(
                f"its array {name} would unpack from {_size(info.compress_size)} to "
                f"{_size(info.file_size)}, which no measured points do"
            )
        with self._archive.open(info) as member:
            version = npy.read_magic(member)
            if version > (2, 0):
                raise ValueError(f"its array {name} has columns with names")
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(member)
            promised = member.tell() + math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise ValueError(
                f"its array {name} holds Python objects; names are written by "
                "np.array(names, dtype=str), points by np.stack(clouds)"
            )
        if promised != info.file_size:
            raise ValueError(
                f"the header of its array {name} promises the shape {shape} and {_size(promised)}, "
                f"but there are {_size(info.file_size)}"
            )
        return info


@contextmanager
def open_npz(path: Path) -> Iterator[NpzFile]:
    """An archive that is open while the block runs.

    Raises:
        DataError: there is no such file, or it is no regular one.
        ValueError: it is no archive of arrays, it is encrypted or broken, an array holds Python
            objects, or the file does not hold what it promises; in the block as well.
        OSError: it cannot be read.
    """
    check_regular(path)
    with path.open("rb") as file:
        if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
            raise ValueError("it is a single array, of np.save, and no archive, of np.savez")
    try:
        with zipfile.ZipFile(path) as archive:
            yield NpzFile(path, archive)
    except (SparsePipeError, ValueError):
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a position that the archive has no byte at
            raise
        raise ValueError("its table of contents is broken") from error
    except Exception as error:  # of zipfile, the decompressors and numpy, many kinds
        raise ValueError(str(error) or type(error).__name__) from error


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 1 << 29 else f"{count / 2**20:,.1f} MiB"
