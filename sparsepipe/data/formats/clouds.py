"""Readers of point clouds: in numpy's formats, LAS, PCD, and text with a point on each line.

Shapes: Q points.
"""

from __future__ import annotations

import re
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MOST_COLUMNS = 16
"""Most columns of an array of three points; a wider array is probably [3, points]."""
_HEADER_LINES = 20
"""The first point must be within this many lines of a text; the PCD format's header has 11."""
_COMMENT = re.compile(r"(#|//).*")
_UNIT = re.compile(r"[\W_]*[\[(].*|[\W_]+")
"""What does not count in a column's name: units in brackets, quotes, signs between words."""
_NAMES = [
    [f"{before}{axis}{after}" for axis in axes]
    for axes in ("xyz", "012")
    for before in ("", "p", "pt", "pos", "coord", *("position", "point", "points", "coordinate"))
    for after in ("", "coord", "coordinate", "pos", "position", "m", "mm", "cm", "km", "ft", "in")
] + [
    [*ground, height]
    for ground in (("easting", "northing"), ("east", "north"), ("e", "n"), ("x", "y"))
    for height in ("z", "elevation", "elev", "height", "h", "altitude", "alt")
]
"""Names of the three columns of coordinates, without blanks and signs; the first found count."""


def read_array_points(path: Path) -> NDArray[Any]:
    """Returns points [Q, 3], the first three columns of the array in an ``.npy`` file.

    In an ``.npz`` file, that array is ``points`` or, without this name, the only one.
    """
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if isinstance(found, np.lib.npyio.NpzFile):
        with found as arrays:
            names = {*arrays.files} & {"points"} or {*arrays.files}
            if len(names) != 1:
                some = ", ".join(sorted(names)[:5]) or "none"
                raise ValueError(f"it has no array named points; its arrays: {some}")
            found = arrays[names.pop()]
    is_table = found.ndim == 2 and found.shape[1] >= 3 and found.dtype.kind in "iuf"
    if not is_table or (len(found) == 3 and found.shape[1] > _MOST_COLUMNS):
        raise ValueError(
            f"its array, of shape {list(found.shape)} and type {found.dtype}, is not a table of "
            "numbers [points, 3]"
        )
    coordinates_Q3: NDArray[Any] = found[:, :3]
    return coordinates_Q3


def read_text_points(path: Path) -> NDArray[np.float64]:
    """Returns points [Q, 3]: the columns that a header names x, y and z, or else the first three.

    Numbers are separated by semicolons, commas or blanks, whichever of these the first point has; a
    number with a decimal comma is refused. Lines may end with a comment after ``#`` or ``//``.

    Raises:
        ValueError: columns have names, but not those of coordinates, or a point is invalid.
    """
    header, points, delimiter, width = _lines(path)
    return _numbers(points, delimiter, _coordinate_columns(header, delimiter, width))


def read_text_table(path: Path) -> tuple[list[str], NDArray[np.float64]]:
    """Returns the names of columns, in lower case, and all numbers [Q, C].

    There are no names if the last line before the first point does not have one for each column,
    among them x, y and z.

    Raises:
        ValueError: a point is invalid.
    """
    header, points, delimiter, width = _lines(path)
    last = header[-1].lstrip("#/ ") if header else ""
    names = [name.strip(" \"'").lower() for name in last.split(delimiter)]
    is_named = len(names) == width and {*"xyz"} <= {*names}
    return names if is_named else [], _numbers(points, delimiter)


def read_las(path: Path) -> dict[str, NDArray[Any]]:
    """Returns ``coord`` float64 [Q, 3] and all other dimensions [Q] of a ``.las`` or ``.laz`` file.

    Raises:
        ValueError: it is cut off, or its header is not valid.
    """
    with path.open("rb") as file:
        head = file.read(247).ljust(247, b"\0")
    size, start, records = struct.unpack_from("<HII", head, 94)
    (extended,) = struct.unpack_from("<I", head, 243) if head[25] == 4 else (0,)
    room = path.stat().st_size - max(start, size)
    # Of a wrong number of records, laspy would read nothing after the file's end for hours.
    if head[:4] != b"LASF" or room < 60 * extended or start < size + 54 * records:
        raise ValueError("it has no valid header of a LAS file")
    las = import_module("laspy").read(path)
    if len(las.points) != las.header.point_count:
        raise ValueError(
            f"it is cut off after {len(las.points)} of {las.header.point_count} points"
        )
    names = [name for name in las.point_format.dimension_names if name not in ("X", "Y", "Z")]
    return {"coord": las.xyz, **{name: np.asarray(las[name]) for name in names}}


def read_pcd(path: Path) -> dict[str, NDArray[Any]]:
    """Returns the fields [Q] of a ``.pcd`` file, packed colours as ``color`` uint8 [Q, 3].

    Raises:
        ValueError: it has no header or is cut off.
    """
    with path.open("rb") as file:
        head = file.read(1 << 14)
        if not all(word in head for word in (b"FIELDS", b"TYPE", b"POINTS", b"\nDATA ")):
            raise ValueError("it has no header of a PCD file")
    cloud = import_module("pypcd4").PointCloud.from_path(path)
    if len(cloud.pc_data) != cloud.points:
        raise ValueError(f"it is cut off after {len(cloud.pc_data)} of {cloud.points} points")
    columns = {name: np.asarray(cloud.pc_data[name]) for name in cloud.fields}
    for name in {"rgb", "rgba"} & columns.keys():
        packed_Q = columns.pop(name).view(np.uint32)
        columns["color"] = np.stack([packed_Q >> 16, packed_Q >> 8, packed_Q], 1).astype(np.uint8)
    return columns


def read_pcd_points(path: Path) -> NDArray[Any]:
    """Returns the finite points [Q, 3] of a ``.pcd`` file; ordered clouds have others as well."""
    fields = read_pcd(path)
    points_Q3: NDArray[Any] = np.column_stack([fields[axis] for axis in "xyz"])
    return points_Q3.compress(np.isfinite(points_Q3).all(axis=1), axis=0)


def _lines(path: Path) -> tuple[list[str], list[str], str | None, int]:
    """Returns a text's lines before the first point, its points, their delimiter and columns."""
    # A header or a comment may be in another encoding, in which numbers are the same.
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    for start, line in enumerate(lines[:_HEADER_LINES]):  # noqa: B007
        delimiter = next((each for each in ";," if each in line), None)
        words = _COMMENT.sub("", line).rstrip(f"{delimiter or ''} \t").split(delimiter)
        try:
            if len([float(word) for word in words[:3]]) == 3:
                break
        except ValueError:
            continue
    else:
        raise ValueError(f"none of its first {_HEADER_LINES} lines begins with three numbers")
    header = [line for line in lines[:start] if line.strip()]
    points = [line for line in lines[start:] if line.strip()]
    if path.suffix.lower() == ".pts" and header and header[-1].strip() != str(len(points)):
        raise ValueError(f"it has {len(points)} points, but {header[-1].strip()} in its header")
    return header, points, delimiter, len(words)


def _numbers(
    points: list[str], delimiter: str | None, columns: list[int] | None = None
) -> NDArray[np.float64]:
    table_QC: NDArray[np.float64] = np.loadtxt(
        points, delimiter=delimiter, usecols=columns, comments=["#", "//"], ndmin=2
    )
    return table_QC


def _coordinate_columns(header: list[str], delimiter: str | None, width: int) -> list[int]:
    """Returns the columns of x, y and z by the last line that names them."""
    unknown, padding = "", (delimiter or "") + " \t"
    for line in reversed(header):
        is_comment = _COMMENT.match(line.strip()) is not None
        text = line.rstrip(padding).lower().lstrip("#/ ").removeprefix("fields ")  # as PCD files
        between = next((each for each in (delimiter, *";,\t") if each and each in text), None)
        fields = [field.strip() for field in text.split(between)]
        names = [_UNIT.sub("", field) for field in fields]
        names = [name for name in names if name or between]  # no units between blanks
        found = next((each for each in _NAMES if {*each} <= {*names}), None)
        # One name less than columns is the habit of tables whose rows have names.
        if found and (len(names) == width or not (is_comment or len(names) == width - 1)):
            return [names.index(name) for name in found]
        has_words = any(map(str.isalpha, text))
        if is_comment:  # prose, unless it has one word for each column
            words = " ".join(fields).split() if between and between == delimiter else []
            has_words &= len(words) == len(fields) == width
        if has_words or (not is_comment and len(fields) > 2):
            unknown = line
    if unknown:
        raise ValueError(
            f"its header {unknown[:80]!r} does not name {width} columns, among them x, y and z, "
            "Points:0 to 2, or easting, northing and height"
        )
    return [0, 1, 2]
