"""Formats of volume files: some can be read in parts, the others are converted once.

``.npy`` and ``.h5`` files and zarr arrays are read in parts directly. ``.tif``, ``.nii`` and
``.nii.gz`` files are decompressed into a ``.npy`` file in the cache. NIfTI files also say where
their voxels are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, explaining_file, new_array
from sparsepipe.errors import DataError

ChannelAxis = Literal["first", "last"]
"""Which axis of an input holds its channels."""
TIFF, NIFTI = (".tif", ".tiff"), (".nii", ".nii.gz")
CONVERTED = (*TIFF, *NIFTI)
"""Suffixes of files that are decompressed into the cache."""
SUFFIXES = (".npy", ".h5", ".hdf5", ".zarr", *CONVERTED)
_ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
_UNNAMED = ("shaped", "uniform", "generic")
"""Kinds of TIFF files in tifffile whose axes it guesses from the shape."""


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


def decompress(path: Path, target: Path, *, channel_axis: ChannelAxis | None = None) -> None:
    """Writes a volume with a suffix of ``CONVERTED`` to the ``.npy`` file ``target``.

    Raises:
        DataError: the file is missing or broken, names axes that contradict ``channel_axis``, or
            the package that reads it is missing.
        OSError: the target cannot be written, or the disk is full.
    """
    with _explained(path):
        if suffix_of(path) in TIFF:
            values: NDArray[Any] = _numeric(_tiff_array(path, channel_axis))
        else:
            stored = import_module("nibabel").load(path).dataobj
            values = np.asarray(_numeric(stored))
            if (stored.slope, stored.inter) != (1, 0):
                values = values.astype(np.float32)
    with new_array(target, dtype=values.dtype.newbyteorder("="), shape=values.shape) as written:
        written[...] = values


def _tiff_array(path: Path, channel_axis: ChannelAxis | None) -> NDArray[Any]:
    """Reads the only image of a TIFF file, or its single pages of one shape as a stack.

    If the file names its axes, that of channels must be at ``channel_axis``: S, the samples of a
    pixel such as its colours, or else C, which tifffile leaves out of OME and ImageJ files where it
    has length 1.
    """
    with import_module("tifffile").TiffFile(path) as file:
        len(file.pages)  # follows all offsets; of a wrong one, tifffile only logs an error
        file.filehandle.seek(file.pages.next_page_offset)
        offset = file.filehandle.read(file.tiff.offsetsize)
        if struct.unpack(file.tiff.offsetformat, offset)[0] >= file.filehandle.size:
            raise ValueError("it is cut off: its next page begins after its end")
        # Thumbnails, and the smaller images of pyramids, are marked as reduced.
        series = [each for each in file.series if not each.keyframe.is_reduced] or file.series[:1]
        first, kinds = series[0], {f"{list(each.shape)} of {each.dtype}" for each in series}
        if len(series) > 1 and (first.kind == "ome" or len(kinds) > 1 or len(first) > 1):
            listed = ", ".join(sorted(kinds))
            raise ValueError(f"it has {len(series)} images, not one or equal pages: {listed}")
        if first.kind == "ome" and any(page is None for page in first):
            raise ValueError("pages that its metadata name are missing, or are in another file")
        arrays: list[NDArray[Any]] = [each.asarray().reshape(each.shape) for each in series]
        axes, all_axes, metadata = first.axes, first.get_axes(squeeze=False), file.shaped_metadata
    values = arrays[0] if len(arrays) == 1 else np.stack(arrays)
    axes = "Q" * (len(arrays) > 1) + axes
    place, channels = 0 if channel_axis == "first" else -1, "S" if "S" in axes else "C"
    is_guessed = first.kind in _UNNAMED and not any("axes" in each for each in metadata or ())
    if channel_axis is None or axes[place] == channels or (is_guessed and "S" not in axes):
        return values
    if channels not in axes and {*"CS"} & {*all_axes}:
        return np.expand_dims(values, place)
    raise DataError(
        f"{path} has the axes {axes} of sizes {list(values.shape)}, which contradicts "
        f"data.source.channel_axis={channel_axis}",
        remedy="set data.source.channel_axis to the place of its axis C or S, or to null without "
        "channels; or write the file with the right axes, channels first or last",
    )


def placement_of(path: Path) -> tuple[NDArray[np.float64], str] | None:
    """Returns the affine [4, 4] of a NIfTI file, from indices of voxels to mm, and as text the
    directions of its axes, such as RAS, and the size of a voxel; None without a valid affine.
    """
    if suffix_of(path) not in NIFTI:
        return None
    with _explained(path):
        nibabel = import_module("nibabel")
        image = nibabel.load(path)
        is_known = image.header["sform_code"] or image.header["qform_code"]
        affine_44 = np.asarray(image.affine, np.float64)
        if not is_known or not np.isfinite(affine_44).all() or not np.linalg.det(affine_44):
            return None
        sides = " x ".join(f"{side:.3g}" for side in np.linalg.norm(affine_44[:3, :3], axis=0))
        return affine_44, f"{''.join(nibabel.aff2axcodes(affine_44))} of {sides} mm"


def _numeric(array: Any) -> Any:
    if np.dtype(array.dtype).kind not in "biuf":
        raise ValueError(f"it has values of type {array.dtype}, not real numbers")
    return array


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    what, remedy = (
        f"cannot be read as {suffix_of(path)}",
        "write the file again, without compression",
    )
    with explaining_file(path, what=what, extra="volumes", remedy=f"{remedy}, or leave it out"):
        if not path.is_dir():  # as zarr arrays are
            check_regular(path)
        yield
