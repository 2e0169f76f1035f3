"""Reading GLB files, with what trimesh leaves out of them: sparse and normalised numbers.

Shapes: N numbers or vectors of an accessor, each of D components.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from numpy.typing import NDArray

_LOOKS = re.compile(r"[A-Z]+_(materials|texture|lights)_\w+")
"""Extensions of glTF that change how a surface looks, but not where it is."""
_TYPES = {5120: "i1", 5121: "u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
_FLOAT, _TRIANGLE_FAN, _SIZES = 5126, 6, {"SCALAR": 1, "VEC3": 3}

_Json = dict[str, Any]


def load_glb(path: Path) -> trimesh.Scene:
    """Returns the scene of a GLB file, without materials; other files are not opened.

    Raises:
        ValueError: the file requires an extension of glTF, or uses a feature, that is not read.
    """
    content, suffix = path.read_bytes(), "glb"
    if content[:8] != b"glTF\2\0\0\0" or int.from_bytes(content[8:12], "little") > len(content):
        raise ValueError("it is not a whole GLB file of version 2")
    size = int.from_bytes(content[12:16], "little")
    tree: _Json = json.loads(content[20 : 20 + size])
    meshes, nodes = tree.get("meshes", []), tree.get("nodes", [])
    primitives = [each for mesh in meshes for each in mesh["primitives"]]
    required = {name for name in tree.get("extensionsRequired", ()) if not _LOOKS.fullmatch(name)}
    required -= {"KHR_mesh_quantization"}
    if importlib.util.find_spec("DracoPy"):  # with which trimesh decodes it
        required -= {"KHR_draco_mesh_compression"}
    if any(any(each.get("weights", ())) for each in meshes + nodes):
        required.add("weights of morph targets")
    if any(each.get("mode") == _TRIANGLE_FAN for each in primitives):
        required.add("triangle fans")
    if required:
        raise ValueError(f"it needs parts of glTF that are not read: {', '.join(sorted(required))}")
    binary, added = content[28 + size :], b""
    numbers = [each["attributes"].get("POSITION") for each in primitives]
    numbers += [each.get("indices") for each in primitives]
    for accessor in [tree["accessors"][number] for number in {*numbers} - {None}]:
        if "sparse" in accessor or accessor.get("normalized"):
            values_ND = _values(tree["bufferViews"], [binary], accessor)
            accessor |= {"bufferView": len(tree["bufferViews"]), "byteOffset": 0, "sparse": None}
            if accessor.get("normalized"):
                accessor["componentType"] = _FLOAT
            start, length = len(binary) + len(added), values_ND.nbytes
            tree["bufferViews"].append({"buffer": 0, "byteOffset": start, "byteLength": length})
            added += values_ND.tobytes()
    if added:
        data = base64.b64encode(binary + added).decode()
        tree["buffers"][0] = {"uri": f"data:;base64,{data}"}
        content, suffix = json.dumps(tree).encode(), "gltf"
    return trimesh.load_scene(
        io.BytesIO(content), file_type=suffix, process=False, resolver={}, skip_materials=True
    )


def _values(views: list[_Json], buffers: list[bytes], accessor: _Json) -> NDArray[Any]:
    """Returns the numbers [N, D] of an accessor; normalised integers become floats."""

    def stored(part: _Json, shape: tuple[int, int], kind: int) -> NDArray[Any]:
        view, dtype = views[part["bufferView"]], np.dtype(_TYPES[kind])
        start = view.get("byteOffset", 0) + part.get("byteOffset", 0)
        strides = (view.get("byteStride", shape[1] * dtype.itemsize), dtype.itemsize)
        return np.ndarray(shape, dtype, buffers[view["buffer"]], start, strides)

    shape, kind = (accessor["count"], _SIZES[accessor["type"]]), accessor["componentType"]
    values_ND = np.zeros(shape, _TYPES[kind])
    if "bufferView" in accessor:
        values_ND[:] = stored(accessor, shape, kind)
    if sparse := accessor.get("sparse"):
        rows, size = sparse["indices"], (sparse["count"], shape[1])
        rows_K = stored(rows, (size[0], 1), rows["componentType"])[:, 0]
        values_ND[rows_K] = stored(sparse["values"], size, kind)
    if accessor.get("normalized"):
        values_ND = np.maximum(values_ND / np.float32(np.iinfo(values_ND.dtype).max), -1)
    return values_ND
