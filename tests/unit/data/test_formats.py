"""Formats of shapes: against each other, variants of OFF, and files that hold no shape."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trimesh

from sparsepipe.data.formats import read_shape
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


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "mesh.off"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
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
    ],
    ids=[
        "plain", "fused", "same line", "lower case", "no edge count", "CRLF", "blanks",
        "byte order mark", "comments", "comments in data",
        "face colours", "vertex colours", "trailing data", "quad",
    ],
)  # fmt: skip
def test_variants_of_one_square(tmp_path: Path, text: str) -> None:
    mesh = read_off(written(tmp_path, text))
    assert len(mesh.faces) == 2
    assert mesh.area == pytest.approx(1)
    assert mesh.bounds.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_polygons_are_triangulated(tmp_path: Path) -> None:
    angle = np.arange(6) * np.pi / 3
    rows = "".join(f"{np.cos(a)} {np.sin(a)} 0\n" for a in angle)
    text = f"OFF\n7 3 0\n{rows}0 0 2\n6 0 1 2 3 4 5\n4 0 1 2 3\n3 0 1 6\n"
    mesh = read_off(written(tmp_path, text))
    hexagon, quad = 1.5 * np.sqrt(3), 0.75 * np.sqrt(3)
    slanted = 0.5 * np.sqrt(4 + 0.75)
    # Fan and quad share triangle 0 1 2 and 0 2 3: duplicates go.
    assert mesh.area == pytest.approx(hexagon + slanted)
    assert mesh.area < hexagon + quad + slanted


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


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1, 1e3, 1e9])
def test_scale_is_kept_and_survives_writing(tmp_path: Path, scale: float) -> None:
    mesh = trimesh.creation.icosphere(subdivisions=2, radius=scale)
    write_off(mesh, tmp_path / "a.off")
    back = read_off(tmp_path / "a.off")
    assert len(back.faces) == len(mesh.faces)
    np.testing.assert_allclose(back.extents, mesh.extents, rtol=1e-6)
    assert back.area == pytest.approx(mesh.area, rel=1e-6)


@pytest.mark.parametrize("distance", [1e7, 1e11])
def test_shapes_far_from_the_origin_keep_their_form(tmp_path: Path, distance: float) -> None:
    mesh = trimesh.creation.icosphere(subdivisions=2)
    write_off(mesh.copy().apply_translation([distance, 0, 0]), tmp_path / "a.off")
    back = read_off(tmp_path / "a.off")
    assert len(back.faces) == len(mesh.faces)
    assert back.area == pytest.approx(mesh.area, rel=1e-3)


MESH = trimesh.creation.annulus(0.5, 1.0, 0.4)
CLOUD_Q3 = np.random.default_rng(0).normal(size=(700, 3)).astype(np.float32)
PLY_OF_POINTS = (
    "ply\nformat {}\nelement vertex 700\nproperty float x\nproperty float y\nproperty float z\n"
    "element face 0\nproperty list uchar int vertex_indices\nend_header\n"
)


@pytest.mark.parametrize("suffix", ["stl", "obj", "ply", "glb", "off", "STL"])
def test_a_mesh_is_the_same_in_each_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"part.{suffix}"
    MESH.export(path, file_type=suffix.lower())
    triangles_F33 = read_shape(path)
    read = trimesh.Trimesh(**trimesh.triangles.to_kwargs(triangles_F33))
    assert triangles_F33.shape == (len(MESH.faces), 3, 3)
    assert read.area == pytest.approx(MESH.area, rel=1e-6)
    assert read.bounds == pytest.approx(MESH.bounds, abs=1e-6)
    assert read.volume == pytest.approx(MESH.volume, rel=1e-5)


def write_ply(path: Path) -> None:
    path.write_bytes(PLY_OF_POINTS.format("binary_little_endian 1.0").encode() + CLOUD_Q3.tobytes())


def write_text_ply(path: Path) -> None:
    lines = "\n".join(" ".join(f"{value:.9g}" for value in row) for row in CLOUD_Q3)
    path.write_text(PLY_OF_POINTS.format("ascii 1.0") + lines)


def text(
    delimiter: str, header: str = "", columns: tuple[int, ...] = (0, 1, 2)
) -> Callable[[Path], None]:
    """Writes the cloud's columns, and a fourth one of -5."""

    def write(path: Path) -> None:
        values_Q4 = np.hstack([CLOUD_Q3, np.full((700, 1), -5.0)])[:, columns]
        rows = [delimiter.join(f"{value:.9g}" for value in row) for row in values_Q4]
        path.write_text(header + "\n".join(rows) + "\n\n")

    return write


def write_latin_1(path: Path, header: str) -> None:
    text(" ", header)(path)
    path.write_bytes(path.read_text(encoding="utf-8").encode("latin-1"))


CLOUDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "npy": ("npy", lambda path: np.save(path, np.hstack([CLOUD_Q3, CLOUD_Q3]))),
    "npz": ("npz", lambda path: np.savez_compressed(path, points=CLOUD_Q3, color=[1])),
    "binary ply": ("ply", write_ply),
    "text ply": ("ply", write_text_ply),
    "glb": ("glb", lambda path: trimesh.PointCloud(CLOUD_Q3).export(path)),
    "vertices alone": (
        "obj",
        lambda path: path.write_text("".join(f"v {x} {y} {z}\n" for x, y, z in CLOUD_Q3)),
    ),
    "blanks": ("xyz", text(" ")),
    "tabs and a byte order mark": ("txt", text("\t", "\ufeff")),
    "commas, names": ("csv", text(",", "x,y,z\n")),
    "semicolons, a comment": ("txt", text("; ", "# from a scanner\n\n")),
    "a comment in Latin-1": ("txt", lambda path: write_latin_1(path, "# für alle Maße\n")),
    "names with units": ("csv", text(";", "Point no.;X [mm];Y [mm];Z [mm]\n", (3, 0, 1, 2))),
    "an index without a name": ("csv", text(",", ",x,y,z\n", (3, 0, 1, 2))),
    "an npz with a single array": ("npz", lambda path: np.savez(path, CLOUD_Q3)),
    "columns by name": ("csv", text(",", '"id","x","y","z"\n', (3, 0, 1, 2))),
    "columns by name in a comment": ("txt", text(",", "//X,Y,Z,Intensity\n700\n", (0, 1, 2, 3))),
}


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_cloud_is_the_same_in_each_format(tmp_path: Path, kind: str) -> None:
    suffix, write = CLOUDS[kind]
    path = tmp_path / f"cloud.{suffix}"
    write(path)
    assert read_shape(path) == pytest.approx(CLOUD_Q3, rel=1e-6)


def write_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # a sparse file


def words(content: str | bytes) -> Callable[[Path], object]:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda path: path.write_bytes(raw)


NO_SHAPES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no format": ("mtl", words("newmtl red")),
    "missing": ("stl", lambda path: None),
    "a pipe": ("npz", os.mkfifo),
    "a large file": ("stl", write_large),
    "large text": ("csv", write_large),
    "objects": ("npy", lambda path: np.save(path, np.array([{}] * 3))),
    "transposed": ("npy", lambda path: np.save(path, CLOUD_Q3.T)),
    "names": ("npy", lambda path: np.save(path, np.array([["a", "b", "c"]]))),
    "several arrays": ("npz", lambda path: np.savez(path, a=CLOUD_Q3, b=CLOUD_Q3)),
    "prose": ("txt", words("A list of parts.\n" * 30)),
    "decimal commas": ("csv", words("X;Y;Z\n1,5;2,5;3,5\n")),
    "decimal commas after the first line": ("xyz", words("1 2 3\n1,5 2 3\n")),
    "infinite": ("xyz", words("1e400 2 3\n")),
    "overflowing": ("xyz", words("1e308 2 3\n")),
    "no surface": ("obj", words("v 0 0 0\nv 1 1 1\nf 1 2 2\n")),
    "four coordinates": ("off", words("4OFF\n" + SQUARE)),
    "a short face": ("off", words("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 2"))),
    "NaN": ("off", words("OFF\n" + SQUARE.replace("1 1 0\n", "1 nan 0\n"))),
    "negative": ("off", words("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 2 -1"))),
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


def test_every_prefix_of_an_off_file_is_refused(tmp_path: Path) -> None:
    text = "OFF\n" + SQUARE
    for length in range(len(text) - 2):
        with pytest.raises(DataError):
            read_off(written(tmp_path, text[:length]))


def test_write_replaces_whole_files(tmp_path: Path) -> None:
    path = written(tmp_path, "half of a fi")
    write_off(trimesh.creation.box(), path)
    assert read_off(path).area == pytest.approx(6)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mesh.off"]


def test_real_meshes(check_data: Path, tmp_path: Path) -> None:
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
        fused = path.read_text().replace("OFF\n", "OFF", 1)
        assert read_off(written(tmp_path, fused)).area == pytest.approx(mesh.area)
