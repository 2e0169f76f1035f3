"""Formats of shapes: against each other, variants of OFF, and files that hold no shape."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import trimesh
from matplotlib.path import Path as Outline
from numpy.typing import ArrayLike

from sparsepipe.data.formats import read_shape, triangle_areas
from sparsepipe.data.formats.off import read_off, write_off
from sparsepipe.errors import DataError

SQUARE = """\
4 2 0
0 0 0
1 0 0
1 1 0
0 1 0
3 0 1 2
3 0 2 3
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "mesh.off"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    "text",
    [
        "OFF\n" + SQUARE,
        "OFF" + SQUARE,  # ModelNet's fused header
        "OFF " + SQUARE,
        "off\n" + SQUARE,
        "OFF\n" + SQUARE.replace("4 2 0", "4 2"),
        ("OFF\n" + SQUARE).replace("\n", "\r\n"),
        ("OFF\n" + SQUARE).replace("\n", "  \t\n\n"),
        "\ufeffOFF\n" + SQUARE,
        "# made by OFF-maker\n\nOFF # header\n# counts\n" + SQUARE,
        "OFF\n" + SQUARE.replace("1 1 0\n", "# corner # 3\n1 1 0 # far\n"),
        "OFF\n" + SQUARE.replace("3 0 1 2", "3 0 1 2 255 0 0").replace("0 2 3", "0 2 3 0.5 1 0"),
        "COFF\n" + SQUARE.replace(" 0\n", " 0 255 255 0 255\n").replace("2 0 255 255 0 255", "2 0"),
        "OFF\n" + SQUARE + "1 2 0\n",  # edges or junk behind the faces
        "OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n",
        "OFF\n" + SQUARE.replace("3 0 1 2", "3 0\n1 2"),
        "OFF " + SQUARE.replace("\n", " "),
        "OFF\n" + SQUARE.replace(" ", "\n"),
    ],
)
def test_variants_of_one_square(tmp_path: Path, text: str) -> None:
    mesh = read_off(written(tmp_path, text))
    assert len(mesh.faces) == 2
    assert mesh.area == pytest.approx(1)
    assert mesh.bounds.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_degenerate_and_duplicate_faces_are_removed(tmp_path: Path) -> None:
    text = (
        "OFF\n9 7 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n0.5 0 0\n"
        "0 0 0\n1 0 0\n1 1 0\n7 7 7\n"
        "3 0 1 2\n3 0 2 3\n"
        "3 2 1 0\n"  # other winding
        "3 5 6 7\n"  # same corners, other vertices
        "3 0 0 1\n3 0 4 1\n2 0 1\n"  # point-like, collinear, an edge
    )
    mesh = read_off(written(tmp_path, text))
    assert mesh.area == pytest.approx(1)
    assert len(mesh.faces) == 2
    assert mesh.extents.tolist() == [1, 1, 0]  # the unused vertex at 7 is gone


@pytest.mark.parametrize(
    ("scale", "distance"), [(1e-9, 0), (1e-3, 0), (1, 0), (1e9, 0), (1, 1e7), (1, 1e11)]
)
def test_scale_and_form_survive_writing(tmp_path: Path, scale: float, distance: float) -> None:
    mesh = trimesh.creation.icosphere(subdivisions=2, radius=scale)
    write_off(mesh.copy().apply_translation([distance, 0, 0]), tmp_path / "a.off")
    back = read_off(tmp_path / "a.off")
    assert len(back.faces) == len(mesh.faces)
    np.testing.assert_allclose(back.extents, mesh.extents, rtol=1e-3 if distance else 1e-6)
    assert back.area == pytest.approx(mesh.area, rel=1e-3 if distance else 1e-6)


MESH = trimesh.creation.annulus(0.5, 1.0, 0.4)
Lists = Sequence[Sequence[int]]
ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
GRID_V3 = [[i, j, 0] for i in range(4) for j in range(4)]
"""A grid of 16 vertices, in which i, j has the number 4 i + j."""
SOLID = "solid\nfacet\nvertex 0 0 0\nvertex 1 0 0\nvertex 0 1 0\nendfacet\nendsolid\n"
CLOUD_Q3 = np.random.default_rng(0).normal(size=(700, 3)).astype(np.float32)


def words(content: str | bytes) -> Callable[[Path], object]:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda path: path.write_bytes(raw)


def ply(form: str, vertices: ArrayLike, lists: Lists = (), *, element: str = "face") -> bytes:
    """A PLY file with ``lists`` of vertex numbers, of one length or several."""
    vertices_V3, order = np.asarray(vertices), ORDERS[form]
    properties = "".join(f"property float {axis}\n" for axis in "xyz")
    header = f"ply\nformat {form} 1.0\nelement vertex {len(vertices_V3)}\n{properties}"
    header += f"element {element} {len(lists)}\nproperty list uchar int vertex_indices\n"
    header += "end_header\n"
    if order:
        rows = [bytes([len(each)]) + np.array(each, f"{order}i4").tobytes() for each in lists]
        return header.encode() + vertices_V3.astype(f"{order}f4").tobytes() + b"".join(rows)
    numbers = [*vertices_V3.tolist(), *([len(each), *each] for each in lists)]
    return (header + "".join(" ".join(f"{n:.9g}" for n in row) + "\n" for row in numbers)).encode()


def glb(kind: str, *, sparse: bool = False, required: str = "KHR_texture_basisu") -> bytes:
    """A unit square moved by 9, of positions of a numpy type; its corner 1, 1 may be sparse."""
    corners_V3 = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]])
    corners_V3 = (corners_V3 * (1 if kind == "f4" else np.iinfo(kind).max)).astype(kind)
    stored_V3 = corners_V3 * np.array([[1], [1], [0], [1]], kind) if sparse else corners_V3
    parts = [stored_V3.tobytes(), bytes([0, 1, 2, 0, 2, 3]), corners_V3[2].tobytes(), bytes([2])]
    ends = np.cumsum([*map(len, parts)]).tolist()
    number = {"i1": 5120, "u1": 5121, "i2": 5122, "u2": 5123, "f4": 5126}[kind]
    position = {"bufferView": 0, "componentType": number, "count": 4, "type": "VEC3"}
    position["normalized"] = kind != "f4"
    if sparse:
        indices = {"bufferView": 3, "componentType": 5121}
        position["sparse"] = {"count": 1, "indices": indices, "values": {"bufferView": 2}}
    numbers = {"bufferView": 1, "componentType": 5121, "count": 6, "type": "SCALAR"}
    tree = {
        "asset": {"version": "2.0"},
        "extensionsRequired": ["KHR_mesh_quantization", required],
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0, "translation": [9, 0, 0]}],
        "buffers": [{"byteLength": ends[-1]}],
        "bufferViews": [
            {"buffer": 0, "byteOffset": end - len(part), "byteLength": len(part)}
            for end, part in zip(ends, parts, strict=True)
        ],
        "accessors": [position, numbers],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1}]}],
    }
    text, binary = json.dumps(tree).encode(), b"".join(parts)
    sizes = struct.pack("<3I", 2, 28 + len(text) + len(binary), len(text))
    return b"glTF" + sizes + b"JSON" + text + struct.pack("<I", len(binary)) + b"BIN\0" + binary


def write_mesh(path: Path) -> None:
    suffix = path.suffix[1:].lower()
    if package := {"3mf": "lxml", "dae": "collada"}.get(suffix):
        pytest.importorskip(package)
    if suffix == "dae":
        path.write_bytes(trimesh.exchange.dae.export_collada(MESH))
    elif suffix == "gltf":
        for name, content in trimesh.exchange.gltf.export_gltf(MESH.scene()).items():
            (path if name.endswith("gltf") else path.with_name(name)).write_bytes(content)
    else:
        MESH.export(path, file_type=suffix)


@pytest.mark.parametrize("suffix", ["stl", "obj", "ply", "glb", "off", "STL", "gltf", "3mf", "dae"])
def test_a_mesh_is_the_same_in_each_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"part.{suffix}"
    write_mesh(path)
    triangles_F33 = read_shape(path)
    read = trimesh.Trimesh(**trimesh.triangles.to_kwargs(triangles_F33))
    assert triangles_F33.shape == (len(MESH.faces), 3, 3)
    assert read.area == pytest.approx(MESH.area, rel=1e-6)
    assert read.bounds == pytest.approx(MESH.bounds, abs=1e-6)
    assert read.volume == pytest.approx(MESH.volume, rel=1e-5)


def write_las(path: Path) -> None:
    laspy = pytest.importorskip("laspy")
    file = laspy.create()
    file.header.scales = [1e-7] * 3
    file.x, file.y, file.z = CLOUD_Q3.T
    file.write(path)


def write_pcd(path: Path) -> None:
    cloud = pytest.importorskip("pypcd4").PointCloud
    ordered_Q3 = np.concatenate([CLOUD_Q3, np.full((5, 3), np.nan, np.float32)])
    cloud.from_xyzi_points(np.column_stack([ordered_Q3, np.ones(705)])).save(path)


def text(
    delimiter: str, header: str = "", columns: tuple[int, ...] = (0, 1, 2), *, coding: str = "utf-8"
) -> Callable[[Path], object]:
    """Writes the cloud's columns, and a fourth one of -5."""
    values_Q4 = np.hstack([CLOUD_Q3, np.full((700, 1), -5.0)])[:, columns]
    rows = [delimiter.join(f"{value:.9g}" for value in row) for row in values_Q4]
    return words((header + "\n".join(rows) + "\n\n").encode(coding))


CLOUDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "npy": ("npy", lambda path: np.save(path, np.hstack([CLOUD_Q3, CLOUD_Q3]))),
    "npz": ("npz", lambda path: np.savez_compressed(path, points=CLOUD_Q3, color=[1])),
    "binary ply": ("ply", words(ply("binary_little_endian", CLOUD_Q3))),
    "text ply": ("ply", words(ply("ascii", CLOUD_Q3))),
    "columns of no name": ("ply", words(ply("ascii", np.hstack([CLOUD_Q3, CLOUD_Q3])))),
    "glb": ("glb", lambda path: trimesh.PointCloud(CLOUD_Q3).export(path)),
    "las": ("las", write_las),
    "laz": ("laz", write_las),
    "an ordered pcd": ("pcd", write_pcd),
    "pts": ("pts", text(" ", "700\n")),
    "vertices alone": ("obj", words("".join(f"v {x} {y} {z}\n" for x, y, z in CLOUD_Q3))),
    "blanks": ("xyz", text(" ")),
    "tabs and a byte order mark": ("txt", text("\t", "\ufeff")),
    "semicolons, a comment": ("txt", text("; ", "# from a scanner\n\n")),
    "a comment in Latin-1": ("txt", text(" ", "# für alle Maße\n", coding="latin-1")),
    "names with units": ("csv", text(";", "Point no.;X [mm];Y [mm];Z [mm]\n", (3, 0, 1, 2))),
    "an index without a name": ("csv", text(",", ",x,y,z\n", (3, 0, 1, 2))),
    "an npz with a single array": ("npz", lambda path: np.savez(path, CLOUD_Q3)),
    "columns by name": ("csv", text(",", '"id","x","y","z"\n', (3, 0, 1, 2))),
    "ParaView's names": ("csv", text(",", '"n","Points:0","Points:1","Points:2"\n', (3, 0, 1, 2))),
    "positions": ("txt", text("\t", "A title\nTime [s]\tPos_X\tPos_Y\tPos_Z\n", (3, 0, 1, 2))),
    "a map": ("csv", text(",", "Northing,Easting (m),id,Height\n", (1, 0, 3, 2))),
    "fields of PCD": ("txt", text(" ", "FIELDS i x y z\nPOINTS 700\nDATA ascii\n", (3, 0, 1, 2))),
    "numbers above and in a comment": ("txt", text(",", "#0,0,0,0\n700 3\n")),
    "columns by name in a comment": ("txt", text(",", "//X,Y,Z,Intensity\n700\n", (0, 1, 2, 3))),
}


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_cloud_is_the_same_in_each_format(tmp_path: Path, kind: str) -> None:
    suffix, write = CLOUDS[kind]
    path = tmp_path / f"cloud.{suffix}"
    write(path)
    step = 1e-7 if suffix in ("las", "laz") else 0  # of their whole numbers
    assert read_shape(path) == pytest.approx(CLOUD_Q3, rel=1e-6, abs=step or None)


def write_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # a sparse file


def write_cut_gltf(path: Path) -> None:
    write_mesh(path)
    for buffer in path.parent.glob("*.bin"):
        buffer.write_bytes(buffer.read_bytes()[:-9])


NO_SHAPES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no format": ("mtl", words("newmtl red")),
    "missing": ("stl", lambda path: None),
    "a pipe": ("npz", os.mkfifo),
    "a large file": ("stl", write_large),
    "objects": ("npy", lambda path: np.save(path, np.array([{}] * 3))),
    "transposed": ("npy", lambda path: np.save(path, CLOUD_Q3.T)),
    "several arrays": ("npz", lambda path: np.savez(path, a=CLOUD_Q3, b=CLOUD_Q3)),
    "prose": ("txt", words("A list of parts.\n" * 30)),
    "decimal commas": ("csv", words("X;Y;Z\n1,5;2,5;3,5\n")),
    "decimal commas after the first line": ("xyz", words("1 2 3\n1,5 2 3\n")),
    "unknown names": ("csv", words("u,v,w\n1,2,3\n")),
    "unknown names in a comment": ("csv", words("# u,v,w\n1,2,3\n")),
    "names of rows": ("txt", words("x y z\n1 1 2 3\n")),
    "a missing value": ("csv", words("x,,z\n1,,3\n1,2,3\n")),
    "a glb cut off": ("glb", words(glb("i2", sparse=True)[:-1])),
    "a solid without end": ("stl", words(SOLID + SOLID[:-20])),
    "an unknown element": ("ply", words(ply("ascii", GRID_V3, [[0, 4, 5]], element="fan"))),
    "an extension of glTF": ("glb", words(glb("f4", required="EXT_meshopt_compression"))),
    "a las of junk": ("las", words("LASF" + "x" * 999)),
    "a laz of junk": ("laz", words("junk")),
    "a pcd of junk": ("pcd", words("VERSION 0.7\nDATA binary\n")),
    "a pts cut off": ("pts", words("3\n1 2 3\n4 5 6\n")),
    "a gltf without its buffer": (
        "gltf",
        words(json.dumps({"buffers": [{"uri": "a.bin", "byteLength": 9}]})),
    ),
    "a gltf whose buffer is cut off": ("gltf", write_cut_gltf),
    "a buffer elsewhere": (
        "gltf",
        words(json.dumps({"buffers": [{"uri": "../../etc/passwd", "byteLength": 9}]})),
    ),
    "a 3mf of junk": ("3mf", words("PK junk")),
    "a dae of junk": ("dae", words("<COLLADA></COLLADA>")),
    "a number of no vertex": ("obj", words("v 0 0 0\nv 1 0 0\nv 0 1 0\nf 0 1 2\n")),
    "infinite": ("xyz", words("1e400 2 3\n")),
    "overflowing": ("xyz", words("1e308 2 3\n")),
    "no surface": ("obj", words("v 0 0 0\nv 1 1 1\nf 1 2 2\n")),
    "four coordinates": ("off", words("4OFF\n" + SQUARE)),
    "a short face": ("off", words("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 2"))),
    "NaN": ("off", words("OFF\n" + SQUARE.replace("1 1 0\n", "1 nan 0\n"))),
    "negative": ("off", words("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 2 -1"))),
    "huge counts": ("off", words("OFF\n" + SQUARE.replace("4 2 0", "1000000000000 2 0"))),
    "zero area": ("off", words("OFF\n3 1 0\n0 0 0\n1 1 1\n2 2 2\n3 0 1 2\n")),
}


@pytest.mark.parametrize("kind", NO_SHAPES)
def test_files_without_a_shape(tmp_path: Path, kind: str) -> None:
    suffix, write = NO_SHAPES[kind]
    path = tmp_path / f"thing.{suffix}"
    write(path)
    with pytest.raises(DataError) as caught:
        read_shape(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy


POLYGONS = {
    "an L": [[2, 0], [2, 1], [1, 1], [1, 2], [0, 2], [0, 0]],
    "a dart": [[3, 3], [0, 1], [-3, 3], [0, 0]],
    "a comb": [[0, 0], [2, 0], [5, 0], [5, 2], [4, 2], [4, 1], [2, 1], [2, 3], [1, 1], [0, 2]],
    "a frame": [[0, 0], [4, 0], [4, 4], [0, 4], [0, 0], [1, 1], [1, 3], [3, 3], [3, 1], [1, 1]],
}


def as_mesh(suffix: str, vertices: ArrayLike, faces: Lists) -> bytes:
    if suffix == "ply":
        return ply("ascii", vertices, faces)
    rows = [" ".join(f"{n:.17g}" for n in row) for row in np.asarray(vertices, float)]
    if suffix == "obj":
        lines = ["v " + row for row in rows]
        lines += ["f " + " ".join(str(n + 1) for n in face) for face in faces]
    else:
        lines = ["OFF", f"{len(rows)} {len(faces)} 0", *rows]
        lines += [" ".join(map(str, [len(face), *face])) for face in faces]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("suffix", ["obj", "off", "ply"])
@pytest.mark.parametrize("name", POLYGONS)
def test_a_concave_face_is_covered_once(tmp_path: Path, name: str, suffix: str) -> None:
    corners_K2, path = np.array(POLYGONS[name], float), tmp_path / f"face.{suffix}"
    points_M2 = np.random.default_rng(0).uniform(-3, 5, (500, 2))
    inside_M = Outline(corners_K2).contains_points(points_M2)
    for start in range(len(corners_K2)):
        face = np.roll(np.arange(len(corners_K2)), start)[:: (-1) ** start].tolist()
        path.write_bytes(as_mesh(suffix, corners_K2 @ [[1, 0, 1], [0, 1, -2]], [face]))  # slanted
        corners_3T2 = read_shape(path)[..., :2].transpose(1, 0, 2)
        sides_3T2 = np.roll(corners_3T2, -1, axis=0) - corners_3T2
        to_M3T2 = points_M2[:, None, None] - corners_3T2
        left_M3T = sides_3T2[..., 0] * to_M3T2[..., 1] > sides_3T2[..., 1] * to_M3T2[..., 0]
        assert ((left_M3T == left_M3T[:, :1]).all(axis=1).sum(axis=1) == inside_M).all()


@pytest.mark.parametrize("suffix", ["obj", "ply"])
@pytest.mark.parametrize("corners", [{3}, {4}, {5}, {3, 4, 5}])
def test_convex_faces_are_cut_as_by_trimesh(tmp_path: Path, suffix: str, corners: set[int]) -> None:
    faces = [[0, 4, 5, 1], [8, 12, 13, 14, 10], [1, 5, 6], [2, 6, 7, 3], [4, 8, 9, 10, 6]]
    taken = [face for face in faces if len(face) in corners]
    head, *lines = as_mesh(suffix, np.array(GRID_V3) / 10, taken).split(b"\nf ")
    materials = [b"\nusemtl %d\nf " % (n % 2) + line for n, line in enumerate(lines)]
    (path := tmp_path / f"grid.{suffix}").write_bytes(head + b"".join(materials))
    expected_T33 = trimesh.load_scene(path, process=False).to_mesh().triangles
    assert np.array_equal(read_shape(path), expected_T33)


@pytest.mark.parametrize("form", ORDERS)
def test_ply_files_of_polygons_and_of_strips(tmp_path: Path, form: str) -> None:
    path = tmp_path / "grid.ply"
    # As many bytes as three quads.
    path.write_bytes(ply(form, GRID_V3, [[0, 4, 5, 1], [1, 5, 6], [8, 12, 13, 14, 10]]))
    assert triangle_areas(read_shape(path)).sum() == 3.5
    strips = [[0, 4, 1, 5, 2, 6, -1, 8, 12, 9, 13], [9, 13, 10], [10]]
    path.write_bytes(ply(form, GRID_V3, strips, element="tristrips"))
    first_T3, second_T3, third_T3 = read_shape(path).transpose(1, 0, 2)
    assert np.cross(second_T3 - first_T3, third_T3 - first_T3)[:, 2].tolist() == [1] * 7


@pytest.mark.parametrize(
    "text",
    [
        "v 5 5 5\nv 0 0 0\nv 1 0 0\nv 1 1 0\nf -3 -2 -1\nv 0 1 0\nf -4 -2 -1\nv 6 6 6\n",
        "\tv 0 0 0\nv\t1 0 0\r\nv 1 1 0 1\nv 0 \\\n1 0 # far\nf\t1/1 2/1 3/1 \\\n 4/1\n",
        "\ufeffv 0 0 0 .5 .5 .5\nv 1 0 0\nv 1 1 0\nv 0 1 0\nl 1 2\nf 1//1 2//1 3//1\nf 1 3 4 # a\n",
    ],
)
def test_variants_of_obj(tmp_path: Path, text: str) -> None:
    (tmp_path / "square.obj").write_bytes(text.encode())
    triangles_T33 = read_shape(tmp_path / "square.obj")
    assert triangle_areas(triangles_T33).tolist() == [0.5, 0.5]
    assert triangles_T33.reshape(-1, 3).max(axis=0).tolist() == [1, 1, 0]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", ["f4", "i1", "u1", "i2", "u2"])
def test_quantised_and_sparse_positions(tmp_path: Path, kind: str, sparse: bool) -> None:
    (tmp_path / "squares.glb").write_bytes(glb(kind, sparse=sparse))
    triangles_T33 = read_shape(tmp_path / "squares.glb")
    assert triangle_areas(triangles_T33).tolist() == [0.5, 0.5]
    assert triangles_T33.max(axis=(0, 1)).tolist() == [10, 1, 0]


CUT_OFF = {
    "lines.off": ("OFF\n" + SQUARE).encode(),
    "one line.off": ("OFF " + SQUARE.replace("\n", " ")).encode(),
    "text.ply": ply("ascii", GRID_V3, [[0, 4, 5], [0, 4, 5, 1]]),
    "mixed.ply": ply("binary_big_endian", GRID_V3, [[0, 4, 5], [0, 4, 5, 1]]),
}


@pytest.mark.parametrize("name", CUT_OFF)
def test_every_prefix_is_refused(tmp_path: Path, name: str) -> None:
    path, whole = tmp_path / name, CUT_OFF[name]
    for length in range(len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read_shape(path)


def test_write_replaces_whole_files(tmp_path: Path) -> None:
    path = written(tmp_path, "half of a fi")
    write_off(trimesh.creation.box(), path)
    assert read_off(path).area == pytest.approx(6)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mesh.off"]


def test_real_meshes(check_data: Path) -> None:
    files = sorted((check_data / "modelnet10_off").rglob("*.off"))
    if not files:
        pytest.skip(f"no ModelNet10 meshes under {check_data}")
    for path in files:
        mesh = read_off(path)
        raw = trimesh.load_mesh(path, process=False)
        assert 0 < mesh.area <= raw.area * (1 + 1e-9)
        # Meshes with every face doubled lose half of their area, none loses more.
        assert mesh.area > 0.49 * raw.area
        corners = raw.triangles.reshape(-1, 3)
        np.testing.assert_allclose(mesh.bounds, [corners.min(axis=0), corners.max(axis=0)])
