"""Reading GLB and glTF files, also what trimesh leaves out: sparse and normalised positions.

Shapes: V vertices.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import trimesh
from numpy.typing import NDArray

_READ = re.compile(r"KHR_mesh_quantization|[A-Z]+_(materials|texture|lights)_\w+")
"""Extensions of glTF that are read, or change how a surface looks, but not where it is."""
_TYPES = {5120: "i1", 5121: "u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
_TRIANGLE_FAN = 6


def load_glb(path: Path) -> trimesh.Scene:
    """Returns the scene of a GLB or glTF file, without materials.

    Of other files, only the buffers of a glTF file beside it are opened.

    Raises:
        ValueError: the file requires an extension of glTF, or uses a feature, that is not read.
    """
    content, is_text = path.read_bytes(), path.suffix.lower() == ".gltf"
    if not is_text and content[:8] != b"glTF\2\0\0\0":
        raise ValueError("it is not a GLB file of version 2")
    size = int.from_bytes(content[12:16], "little")
    tree: dict[str, Any] = json.loads(content if is_text else content[20 : 20 + size])
    uris = [each["uri"] for each in tree.get("buffers", ()) if "uri" in each]
    buffers = {uri: path.parent / unquote(uri) for uri in uris if not uri.startswith("data:")}
    for uri, file in buffers.items():
        if file.parent != path.parent or not file.is_file():
            raise ValueError(f"its buffer {uri} is not beside it")
    meshes, accessors = tree.get("meshes", []), tree.get("accessors", [])
    primitives = [each for mesh in meshes for each in mesh["primitives"]]
    unread = {name for name in tree.get("extensionsRequired", ()) if not _READ.fullmatch(name)}
    if any(any(each.get("weights", ())) for each in meshes + tree.get("nodes", [])):
        unread.add("weights of morph targets")
    if any(each.get("mode") == _TRIANGLE_FAN for each in primitives):
        unread.add("triangle fans")
    if any("sparse" in accessors[each["indices"]] for each in primitives if "indices" in each):
        unread.add("sparse indices")
    if unread:
        raise ValueError(f"it needs parts of glTF that are not read: {', '.join(sorted(unread))}")
    scene = trimesh.load_scene(
        io.BytesIO(content),
        file_type="gltf" if is_text else "glb",
        process=False,
        resolver={uri: file.read_bytes() for uri, file in buffers.items()},
        skip_materials=True,
    )
    stored = [accessors[each["attributes"]["POSITION"]] for each in primitives]
    if any("sparse" in each or each.get("normalized") for each in stored):
        if is_text:
            raise ValueError("its positions are sparse or normalised: write it as .glb")
        for part, accessor in zip(scene.geometry.values(), stored, strict=True):
            part.vertices = _positions(
                np.array(part.vertices), accessor, tree, content[28 + size :]
            )
    return scene


def _positions(
    values_V3: NDArray[np.float64], accessor: dict[str, Any], tree: dict[str, Any], binary: bytes
) -> NDArray[np.float64]:
    """Returns an accessor's positions, of the dense numbers that are stored for it."""
    kind = accessor["componentType"]
    if sparse := accessor.get("sparse"):
        rows, values = [
            np.frombuffer(
                [binary][view["buffer"]],
                _TYPES[part.get("componentType", kind)],
                sparse["count"] * width,
                view.get("byteOffset", 0) + part.get("byteOffset", 0),
            )
            for part, width in ((sparse["indices"], 1), (sparse["values"], 3))
            for view in [tree["bufferViews"][part["bufferView"]]]
        ]
        values_V3[rows] = values.reshape(-1, 3)
    if accessor.get("normalized"):
        values_V3 = np.maximum(values_V3 / np.iinfo(_TYPES[kind]).max, -1)
    return values_V3
