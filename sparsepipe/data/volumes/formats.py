"""Formats of volume files: what they hold, where their voxels are, and writing in the same format.

``.npy`` and ``.h5`` files and zarr arrays can be read in parts; files of the other formats are
decompressed once. All of them but ``.npy`` can say how large voxels are, and NIfTI, NRRD and
MetaImage files where they are.

Shapes: D spatial dimensions, K channels.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.files import check_regular, explaining_file
from sparsepipe.data.volumes.geometry import Geometry, Known
from sparsepipe.errors import DataError

ChannelAxis = Literal["first", "last"]
"""Which axis of an input holds its channels."""
TIFF, NIFTI = (".tif", ".tiff"), (".nii", ".nii.gz")
_ITK = {".nrrd": "NrrdImageIO", ".mha": "MetaImageIO"}
CONVERTED = (*TIFF, *NIFTI, *_ITK)
"""Suffixes of files that are decompressed into the cache."""
SUFFIXES = (".npy", ".h5", ".hdf5", ".zarr", *CONVERTED)
_ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
_UNNAMED = ("shaped", "uniform", "generic")
"""Kinds of TIFF files in tifffile whose axes it guesses from the shape."""
_UNITS_MM = {
    **dict.fromkeys(("mm", "millimeter"), 1.0),
    **dict.fromkeys(("m", "meter"), 1e3),
    **dict.fromkeys(("um", "\u00b5m", "\u03bcm", "micron", "microns", "micrometer"), 1e-3),
    **dict.fromkeys(("nm", "nanometer"), 1e-6),
}
"""Units of length, as formats write them, in mm."""
_ATTRIBUTES_MM = {"spacing": 1.0, "element_size_um": 1e-3}
"""Attributes of h5 and zarr arrays with the sizes of voxels, and their units in mm."""
_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""From ITK's world, whose axes point left, posterior and superior, to RAS+, and back."""


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


def stem_of(path: Path) -> str:
    """Returns the name of a volume without its suffix, such as ``scan`` of ``scan.nii.gz``."""
    suffix = suffix_of(path)
    return path.name[: -len(suffix)] if path.name.lower().endswith(suffix) else path.name


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


def read_volume(
    path: Path, *, channel_axis: ChannelAxis | None = None
) -> tuple[NDArray[Any], Geometry]:
    """Reads a whole volume: an array [*sizes], or [K, *sizes] with channels, and its geometry.

    Axes are in the order of the file's format: x, y, z in NIfTI, NRRD and MetaImage, z, y, x in
    TIFF files. NIfTI files that scale their values are read as float32.

    Raises:
        DataError: the file is missing or broken, names axes that contradict ``channel_axis``, has
            more than three spatial axes, or the package that reads it is missing.
    """
    with _opened(path, channel_axis) as (geometry, read):
        values = _numeric(read())
        if channel_axis is not None:
            values = np.moveaxis(values, 0 if channel_axis == "first" else -1, 0)
        return values.astype(values.dtype.newbyteorder("="), copy=False), geometry


def geometry_of(path: Path, *, channel_axis: ChannelAxis | None = None) -> Geometry:
    """Returns the geometry of a volume without reading its values; raises as ``read_volume``."""
    with _opened(path, channel_axis) as (geometry, _):
        return geometry


def check_replaceable(path: Path, *, inputs: Sequence[Path]) -> None:
    """Raises a DataError if writing a volume there would remove one of the inputs or other data.

    An existing file may be replaced, and a directory that is one zarr array.
    """
    is_safe = not any(each.resolve().is_relative_to(path.resolve()) for each in inputs)
    if is_safe and path.is_dir():
        with open_volume(path):  # a DataError unless it is an array
            is_safe = sum(each.name in _ZARR_FILES for each in path.rglob("*")) == 1
    if not is_safe:
        raise DataError(
            f"{path} is not replaced, because it is or holds an input or several arrays",
            remedy="write the volume to another place",
        )


def write_volume(
    path: Path, values: NDArray[Any], *, like: Path, channel_axis: ChannelAxis | None = None
) -> None:
    """Writes a volume in the format and geometry of another one, completely or not at all.

    Channels are stored where the format has them: in the last axis of NIfTI files, as components of
    a voxel in NRRD and MetaImage files, in the first axis of TIFF files, which get metadata of OME,
    and else in the axis ``channel_axis``, by default the first. NRRD files are written in mm.

    Args:
        path: the new file, with the suffix of ``like``.
        values: array [*sizes] or, with channels, [K, *sizes].
        like: the volume whose format and geometry it gets.
        channel_axis: which axis of ``like`` holds its channels.

    Raises:
        DataError: as ``read_volume`` and ``check_replaceable``, with ``like`` as the input.
    """
    check_replaceable(path, inputs=[like])
    geometry = geometry_of(like, channel_axis=channel_axis)
    suffix, dimensions = suffix_of(like), len(geometry.sizes)
    if values.shape[-dimensions:] != geometry.sizes:
        raise ValueError(f"{values.shape} does not end with the sizes {geometry.sizes} of {like}")
    has_channels = values.ndim > dimensions
    if has_channels and (suffix in NIFTI or (channel_axis == "last" and suffix not in CONVERTED)):
        values = np.moveaxis(values, 0, -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        made = Path(folder) / f"volume{suffix}"
        if suffix in NIFTI:
            image = import_module("nibabel").load(like)
            if has_channels:  # the fourth axis is the first that is not spatial
                values = values.reshape((*geometry.sizes, 1, 1)[:3] + values.shape[-1:])
            header = image.header.copy()
            header.set_data_dtype(values.dtype)
            header["cal_min"] = header["cal_max"] = 0  # the range in which viewers show the input
            image.__class__(values, image.affine, header).to_filename(made)
        elif suffix in _ITK:
            sitk, reader = import_module("SimpleITK"), _itk_header(like)
            # In numpy, ITK's axes are in reverse order, and components of voxels are last.
            stored = np.moveaxis(values.T, -1, dimensions) if has_channels else values.T
            image = sitk.GetImageFromArray(np.ascontiguousarray(stored), isVector=has_channels)
            directions = np.reshape(reader.GetDirection(), (reader.GetDimension(), -1))
            unit_mm = _nrrd_unit_mm(like) or 1.0 if suffix == ".nrrd" else 1.0
            image.SetSpacing([unit_mm * each for each in reader.GetSpacing()[:dimensions]])
            image.SetOrigin([unit_mm * each for each in reader.GetOrigin()[:dimensions]])
            image.SetDirection(directions[:dimensions, :dimensions].ravel().tolist())
            sitk.WriteImage(image, str(made), useCompression=True)
        elif suffix in TIFF:
            metadata: dict[str, Any] = {"axes": "C" * has_channels + "ZYX"[-dimensions:]}
            for axis, side in zip("ZYX"[-dimensions:], geometry.spacing, strict=True):
                if geometry.known != "nothing":
                    metadata |= {f"PhysicalSize{axis}": side, f"PhysicalSize{axis}Unit": "mm"}
            settings = {"ome": True, "photometric": "minisblack", "metadata": metadata}
            import_module("tifffile").imwrite(made, values, **settings)
        elif suffix == ".npy":
            np.save(made, values)
        else:
            _write_array(made, values, like=like, geometry=geometry)
        if path.is_dir():
            path.replace(Path(folder) / "replaced")
        made.replace(path)


def _write_array(made: Path, values: NDArray[Any], *, like: Path, geometry: Geometry) -> None:
    """Writes an h5 or zarr array whose attributes say of its voxels what the file ``like`` says."""
    with open_volume(like) as array:
        attributes = {name: array.attrs[name] for name in {*_ATTRIBUTES_MM} & {*array.attrs}}
        if geometry.known == "spacing" and not attributes:  # its group says it
            attributes = {"spacing": [*geometry.spacing]}
        if suffix_of(like) == ".zarr":
            settings = {"zarr_format": array.metadata.zarr_format, "attributes": attributes}
            values = np.ascontiguousarray(values)
            import_module("zarr").create_array(made, data=values, **settings)
        else:
            with import_module("h5py").File(made, "w") as file:
                new = file.create_dataset(array.name, data=values, compression="gzip")
                new.attrs.update(attributes)


_Opened = tuple[tuple[int, ...], NDArray[np.float64], Callable[[], NDArray[Any]]]
"""Shape of a file's array; its affine [4, 4], or its spacing [D] with 0 where it is unknown, in mm;
and a function that reads the array.
"""


@contextmanager
def _opened(
    path: Path, channel_axis: ChannelAxis | None
) -> Iterator[tuple[Geometry, Callable[[], NDArray[Any]]]]:
    """Yields the geometry of a volume, and a function that reads it, with channels as stored."""
    suffix, channels = suffix_of(path), int(channel_axis is not None)
    with _explained(path), ExitStack() as stack:
        if suffix in NIFTI:
            shape, place, read = _nifti(path, channels)
        elif suffix in _ITK:
            shape, place, read = _itk(path, channel_axis)
        elif suffix in TIFF:
            file = stack.enter_context(import_module("tifffile").TiffFile(path))
            shape, place, read = _tiff(path, file, channel_axis)
        else:
            array = stack.enter_context(open_volume(path))
            shape, place = tuple(array.shape), _array_spacing(path, array, channel_axis)
            read = partial(array.__getitem__, ...)
        if channel_axis == "first" and suffix in (*NIFTI, *_ITK):
            raise ValueError("its channels are last, which needs data.source.channel_axis=last")
        sizes = shape[channels:] if channel_axis == "first" else shape[: len(shape) - channels]
        if not 1 <= len(sizes) <= 3 or min(shape) < 1:
            raise DataError(
                f"{path} has the shape {list(shape)} (spatial dimensions: {len(sizes)}), but "
                "samples need one to three spatial dimensions and no empty axis",
                remedy="set data.source.channel_axis to first or last if this axis holds channels, "
                "or else to null; or write the files with a valid shape",
            )
        known: Known = "place" if place.ndim == 2 else "spacing"
        affine_44 = place if known == "place" else np.diag([*place, 1, 1, 1][:4])
        columns_3D = affine_44[:3, : len(sizes)]
        if not np.isfinite(columns_3D).all() or np.linalg.matrix_rank(columns_3D) < len(sizes):
            affine_44, known = np.eye(4), "nothing"
        yield Geometry(sizes, affine_44, known, file=str(path)), read


def _nifti(path: Path, channels: int) -> _Opened:
    image = import_module("nibabel").load(path)
    stored, header = image.dataobj, image.header
    shape = tuple(stored.shape)
    while len(shape) > 3 + channels and shape[3] == 1:  # empty time before channels, or nothing
        shape = (*shape[:3], *shape[4:])
    place = np.array(image.affine, np.float64)
    if not (header["sform_code"] or header["qform_code"]):
        place = header["pixdim"][1 : len(shape) + 1 - channels].astype(np.float64)
    place[:3] *= _UNITS_MM.get(header.get_xyzt_units()[0], 1.0)  # mm if it is unknown

    def read() -> NDArray[Any]:
        values = np.asarray(stored).reshape(shape)
        return values if (stored.slope, stored.inter) == (1, 0) else values.astype(np.float32)

    return shape, place, read


def _itk_header(path: Path) -> Any:
    reader = import_module("SimpleITK").ImageFileReader()
    reader.SetImageIO(_ITK[suffix_of(path)])
    reader.SetFileName(str(path))
    reader.ReadImageInformation()
    return reader


def _itk(path: Path, channel_axis: ChannelAxis | None) -> _Opened:
    sitk, reader = import_module("SimpleITK"), _itk_header(path)
    shape, components = tuple(reader.GetSize()), reader.GetNumberOfComponents()
    if components > 1:
        shape = (*shape, components)
        if channel_axis != "last":
            raise ValueError(
                f"it has {components} components in each voxel, which needs "
                "data.source.channel_axis=last"
            )
    number, dimensions = reader.GetDimension(), min(reader.GetDimension(), 3)
    place, spacing = np.eye(4), np.array(reader.GetSpacing()[:dimensions])
    directions = np.reshape(reader.GetDirection(), (number, number))[:dimensions, :dimensions]
    place[:dimensions, :dimensions] = directions * spacing
    place[:dimensions, 3] = reader.GetOrigin()[:dimensions]
    place = _LPS @ place
    if suffix_of(path) == ".nrrd":
        place[:3] *= (unit_mm := _nrrd_unit_mm(path))
        metadata = {key: reader.GetMetaData(key) for key in reader.GetMetaDataKeys()}
        if metadata.get("NRRD_space") != "left-posterior-superior":  # as ITK names all of patients
            place = spacing * unit_mm

    def read() -> NDArray[Any]:
        values: NDArray[Any] = sitk.GetArrayFromImage(reader.Execute()).T
        return np.moveaxis(values, 0, -1) if components > 1 else values

    return shape, place, read


def _nrrd_unit_mm(path: Path) -> float:
    """Returns the unit of length of a NRRD file in mm, for which ITK always takes mm.

    It is 0 if the file does not say how large its voxels are, for which ITK takes 1, or in which of
    several units.
    """
    with path.open("rb") as file:
        lines = iter(lambda: file.readline().strip(), b"")  # up to the first empty line
        header = b"\n".join(lines).decode(errors="replace").lower()
    fields = dict(re.findall(r"^([a-z ]+): *(.*)$", header, re.MULTILINE))
    units = re.findall('"([^"]+)"', fields.get("space units") or fields.get("units") or "")
    units_mm = {_UNITS_MM.get(unit, 0.0) for unit in units} or {1.0}
    has_sides = not {"spacings", "space directions"}.isdisjoint(fields)
    return units_mm.pop() if has_sides and len(units_mm) == 1 else 0.0


def _array_spacing(path: Path, array: Any, channel_axis: ChannelAxis | None) -> NDArray[np.float64]:
    """Returns the spacing of an h5 or zarr array in mm, from its attributes or OME-Zarr's."""
    attributes, dimensions = getattr(array, "attrs", {}), array.ndim - (channel_axis is not None)
    spacing = np.zeros(dimensions)
    if found := [name for name in _ATTRIBUTES_MM if name in attributes]:
        spacing = np.array(attributes[found[0]], np.float64) * _ATTRIBUTES_MM[found[0]]
    elif suffix_of(path) == ".zarr" and any((path.parent / x).is_file() for x in _ZARR_FILES):
        attributes = import_module("zarr").open_group(path.parent, mode="r").attrs
        for image in attributes.get("ome", attributes).get("multiscales", ()):
            units = [_UNITS_MM.get(axis.get("unit"), 0.0) for axis in image["axes"]]
            for level in image["datasets"]:
                if level["path"] == path.name:
                    spacing = np.array(units)
                    for change in (level, image):  # the image's own changes follow
                        for each in change.get("coordinateTransformations", ()):
                            spacing *= each.get("scale", 1.0)
        if channel_axis is not None and len(spacing) > dimensions:
            spacing = spacing[1:] if channel_axis == "first" else spacing[:-1]
    if len(spacing) != dimensions:
        raise ValueError(f"it gives the spacing along {len(spacing)} of {dimensions} axes")
    return spacing


def _tiff(path: Path, file: Any, channel_axis: ChannelAxis | None) -> _Opened:
    """Opens the only image of a TIFF file, or its single pages of one shape as a stack.

    If the file names its axes, that of channels must be at ``channel_axis``: S, the samples of a
    pixel such as its colours, or else C, which tifffile leaves out of OME and ImageJ files where it
    has length 1.
    """
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
    axes, shape = first.axes, tuple(first.shape)
    if len(series) > 1:
        axes, shape = f"Q{axes}", (len(series), *shape)
    place, channels = 0 if channel_axis == "first" else len(axes) - 1, "S" if "S" in axes else "C"
    named = any("axes" in each for each in file.shaped_metadata or ())
    is_guessed = first.kind in _UNNAMED and not named and "S" not in axes
    if channel_axis is not None and axes[place] != channels and not is_guessed:
        if channels in axes or not {*"CS"} & {*first.get_axes(squeeze=False)}:
            raise DataError(
                f"{path} has the axes {axes} of sizes {list(shape)}, which contradicts "
                f"data.source.channel_axis={channel_axis}",
                remedy="set data.source.channel_axis to the place of its axis C or S, or to null "
                "without channels; or write the file with the right axes, channels first or last",
            )
        place += channel_axis == "last"
        axes, shape = f"{axes[:place]}C{axes[place:]}", (*shape[:place], 1, *shape[place:])
    sides = _tiff_sides(file)
    spatial = axes if channel_axis is None else axes[:place] + axes[place + 1 :]
    spacing = np.array([sides.get(axis, 0.0) for axis in spatial])

    def read() -> NDArray[Any]:
        arrays = [each.asarray() for each in series]
        return (arrays[0] if len(arrays) == 1 else np.stack(arrays)).reshape(shape)

    return shape, spacing, read


def _tiff_sides(file: Any) -> dict[str, float]:
    """Returns sizes of voxels in mm along the axes that the file's metadata give."""
    if file.is_ome:
        pixels = next(ElementTree.fromstring(file.ome_metadata).iterfind(".//{*}Pixels"))
        return {
            axis: float(size) * _UNITS_MM.get(pixels.get(f"PhysicalSize{axis}Unit", "um"), 0.0)
            for axis in "XYZ"
            if (size := pixels.get(f"PhysicalSize{axis}"))
        }
    if not file.is_imagej:
        return {}
    metadata, tags = file.imagej_metadata, file.pages[0].tags
    unit_mm = _UNITS_MM.get(str(metadata.get("unit")).replace("\\u00B5", "u"), 0.0)
    sides = {"Z": abs(metadata.get("spacing", 0.0)) * unit_mm}
    for axis in "XY":
        count, length = tags[f"{axis}Resolution"].value if f"{axis}Resolution" in tags else (1, 0)
        sides[axis] = length / count * unit_mm if count else 0.0
    return sides


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
