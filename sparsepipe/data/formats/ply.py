"""PLY files, of text and of both byte orders: meshes of polygons or strips, and clouds.

Shapes: V vertices, N rows of an element, C numbers of all rows, S numbers with the ends of strips,
T triangles, Q points.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparsepipe.data.formats.polygons import triangulate
from sparsepipe.utils.files import replacing

_HEADER = re.compile(rb"(?i:ply)\s.*?^end_header[ \t]*\r?\n", re.DOTALL | re.MULTILINE)
_LINE = re.compile(
    r"^(?:format\s+(\S+)|element\s+(\S+)\s+(\S+)|property\s+(?:list\s+(\S+)\s+)?(\S+)\s+(\S+))",
    re.MULTILINE,
)
_ORDERS: dict[str, Literal["<", ">"]] = {"binary_little_endian": "<", "binary_big_endian": ">"}
_TYPES = {"char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4"}
_TYPES |= {"float": "f4", "double": "f8"}  # others, such as uint8 and float32, are numpy's names
_INDICES = ("vertex_indices", "vertex_index", "vertex_indexes", "indices", "vertices")
"""Names of lists of vertex numbers."""

PlyColumns = dict[str, tuple[NDArray[np.int64], NDArray[Any]]]
"""How many numbers [N] each row has of a property, and these numbers [C], by its name."""

_Property = tuple[str, np.dtype[Any], np.dtype[Any], np.dtype[Any] | None]
"""A property's name, its type and that in the file, and the type there of a list's length."""


def read_ply(path: Path) -> NDArray[np.float64]:
    """Returns the triangles [T, 3, 3] of faces and triangle strips, or else the points [Q, 3].

    Raises:
        ValueError: the file is damaged, or holds faces in an element that is not read.
    """
    return _shape(read_elements(path))


def read_elements(path: Path) -> dict[str, PlyColumns]:
    """Returns the columns of each element that has rows; a ValueError if the file is damaged."""
    content = path.read_bytes()
    header = _HEADER.match(content)
    if header is None:
        raise ValueError("it has no header from ply to end_header")
    order, elements = None, dict[str, tuple[int, list[_Property]]]()
    for form, element, rows, length, kind, name in _LINE.findall(header.group().decode("latin-1")):
        if form:  # numbers of text are packed in 8 bytes
            order = _ORDERS[form] if form != "ascii" else None
        elif element:
            elements[element] = int(rows), []
        else:
            types = [np.dtype(_TYPES.get(each, each)) for each in (kind, length or kind)]
            stored = [each.newbyteorder(order) if order else np.dtype("f8") for each in types]
            properties = elements[next(reversed(elements))][1]
            properties.append((name, types[0], stored[0], stored[1] if length else None))
    body, at = content[header.end() :], 0
    if not order:
        body = _packed(body, elements)
    columns = dict[str, PlyColumns]()
    for name, (rows, properties) in elements.items():
        if rows and properties:
            columns[name], at = _read_element(body, at, rows, properties)
    if at != len(body):
        raise ValueError("numbers follow its last element")
    return columns


def _packed(text: bytes, elements: dict[str, tuple[int, list[_Property]]]) -> bytes:
    """Returns the numbers of a text that its header declares, in 8 bytes each."""
    lines, numbers = iter([line for line in text.splitlines() if line.strip()]), list[bytes]()
    for rows, properties in elements.values():
        for words in map(bytes.split, islice(lines, rows)):
            needed = 0
            for *_, length in properties:
                needed += 1 + (int(words[needed]) if length is not None else 0)
            if len(words) < needed:
                raise ValueError("a row of an element is cut off")
            numbers += words[:needed]
    return np.array(numbers, np.float64).tobytes()


def _read_element(
    body: bytes, at: int, rows: int, properties: list[_Property]
) -> tuple[PlyColumns, int]:
    """Returns an element's columns, which begin at byte ``at``, and the byte after its last row."""
    start, fields = at, list[tuple[Any, ...]]()  # of the first row
    lengths = {name: list[int]() for name, *_ in properties}
    values = {name: list[bytes]() for name in lengths}
    for row in range(rows):
        for name, _, dtype, length in properties:
            count = 1
            if length is not None:
                word = body[at : at + length.itemsize].ljust(length.itemsize, b"\0")
                count = int(np.frombuffer(word, length)[0])
                at += length.itemsize
            end = at + count * dtype.itemsize
            if not at <= end <= len(body):
                raise ValueError(
                    f"it is cut off, or not as its header says, in row {row} of an element"
                )
            lengths[name].append(count)
            values[name].append(body[at:end])
            at = end
        # If all rows are as long as the first, they are read as a table, which is much faster.
        if row == 0 and start + rows * (at - start) <= len(body):
            for name, _, dtype, length in properties:
                fields += [(f"{name} length", length)] if length else []
                fields.append((name, dtype, (lengths[name][0],)))
            table = np.frombuffer(body, np.dtype(fields), rows, start)
            sizes = [table[f"{name} length"] for name, *_, length in properties if length]
            if all((size_N == size_N[0]).all() for size_N in sizes):
                lengths = {name: found * rows for name, found in lengths.items()}
                values = {name: [table[name].tobytes()] for name in values}
                at = start + table.nbytes
                break
    return {
        name: (np.array(lengths[name]), np.frombuffer(b"".join(values[name]), stored).astype(dtype))
        for name, dtype, stored, _ in properties
    }, at


def _shape(columns: dict[str, PlyColumns]) -> NDArray[np.float64]:
    """Returns the triangles of the elements ``face`` and ``tristrips``, or else the vertices."""
    vertex = columns.pop("vertex", {})
    if not {*"xyz"} <= {*vertex}:
        raise ValueError("it has no vertices with x, y and z")
    vertices_V3 = np.column_stack([vertex[axis][1] for axis in "xyz"]).astype(np.float64)
    faces = list[tuple[NDArray[np.int64], NDArray[Any]]]()
    for name, lists in columns.items():
        key = next((key for key in _INDICES if key in lists), None)
        is_read = name in ("face", "tristrips")
        if is_read and len(lists) == 1:
            (key,) = lists
        if is_read and key is not None:
            faces.append(lists[key] if name == "face" else _strip_triangles(*lists[key]))
        elif is_read or (key is not None and (lists[key][0] > 2).any()):
            raise ValueError(f"its element {name} holds faces in a form that is not read")
    if not faces:
        return vertices_V3
    counts_F, corners_C = map(np.concatenate, zip(*faces, strict=True))
    faces_T3, kinds_T = triangulate(vertices_V3, corners_C, counts_F)
    triangles_T33: NDArray[np.float64] = vertices_V3[faces_T3[kinds_T.argsort(kind="stable")]]
    return triangles_T33


def _strip_triangles(
    lengths_N: NDArray[np.int64], strips_C: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns 3 [T] and the corners [3 T] of strips, which end with -1 or with their list."""
    strips_S = np.insert(strips_C.astype(np.int64), np.cumsum(lengths_N), -1)
    index_S = np.arange(len(strips_S))
    start_S = np.maximum.accumulate(np.where(strips_S == -1, index_S + 1, 0))
    corners_T3 = np.stack([strips_S[:-2], strips_S[1:-1], strips_S[2:]], axis=1)
    odd_T = ((index_S - start_S) % 2 == 1)[:-2]
    corners_T3[odd_T, :2] = corners_T3[odd_T, 1::-1]  # the sense of rotation alternates
    twins_T3 = corners_T3 == np.roll(corners_T3, 1, axis=1)
    corners_T3 = corners_T3[~(twins_T3 | (corners_T3 == -1)).any(axis=1)]
    return np.full(len(corners_T3), 3), corners_T3.reshape(-1)


def write_ply(path: Path, columns: Mapping[str, NDArray[Any]], *, comments: Sequence[str]) -> None:
    """Writes vertices, columns [Q] in their types by name, as a binary file, atomically."""
    types = {np.dtype(kind): name for name, kind in _TYPES.items()}
    fields = [(name, values.dtype.newbyteorder("<")) for name, values in columns.items()]
    table = np.empty(len(next(iter(columns.values()))), fields)
    for name, values in columns.items():
        table[name] = values
    lines = ["ply", "format binary_little_endian 1.0", *(f"comment {each}" for each in comments)]
    lines.append(f"element vertex {len(table)}")
    lines += [f"property {types[values.dtype]} {name}" for name, values in columns.items()]
    content = "\n".join([*lines, "end_header\n"]).encode()
    # Hundreds are written in a row: waiting for the disk after each would take seconds.
    with replacing(path, durable=False) as temporary:
        temporary.write_bytes(content + table.tobytes())
