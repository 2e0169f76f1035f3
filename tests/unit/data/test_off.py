from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trimesh

from sparsepipe.data.off import read_off, write_off
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
        ("OFF\n" + SQUARE).replace("\n", "  \t\n"),
        ("OFF\n" + SQUARE).replace("\n", "\n\n"),
        ("OFF\n" + SQUARE).rstrip("\n"),
        "\ufeffOFF\n" + SQUARE,
        "# made by OFF-maker\n\nOFF # header\n# counts\n" + SQUARE,
        "OFF\n" + SQUARE.replace("1 1 0\n", "# corner # 3\n1 1 0 # far\n"),
        "OFF\n" + SQUARE.replace("3 0 1 2", "3 0 1 2 255 0 0").replace("0 2 3", "0 2 3 0.5 1 0"),
        "COFF\n" + SQUARE.replace(" 0\n", " 0 255 255 0 255\n").replace("2 0 255 255 0 255", "2 0"),
        "OFF\n" + SQUARE + "1 2 0\n",  # edges or junk behind the faces
        "OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n",
    ],
    ids=[
        "plain", "fused", "same line", "lower case", "no edge count", "CRLF", "trailing spaces",
        "blank lines", "no last newline", "byte order mark", "comments", "comments in data",
        "face colours", "vertex colours", "trailing data", "quad",
    ],
)  # fmt: skip
def test_variants_of_one_square(tmp_path: Path, text: str) -> None:
    mesh = read_off(written(tmp_path, text))
    assert len(mesh.faces) == 2
    assert mesh.area == pytest.approx(1)
    assert mesh.bounds.tolist() == [[0, 0, 0], [1, 1, 0]]


def test_comments_in_another_encoding(tmp_path: Path) -> None:
    mesh = read_off(written(tmp_path, b"OFF\n# gr\xfc\xdfe\n" + SQUARE.encode()))
    assert mesh.area == pytest.approx(1)


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


BROKEN = {
    "empty": ("", "empty"),
    "only comments": ("# nothing\n", "empty"),
    "no header": (SQUARE, "not an OFF file"),
    "another format": ("ply\nformat ascii 1.0\n", "not an OFF file"),
    "four coordinates": ("4OFF\n" + SQUARE, "not an OFF file"),
    "binary": (b"OFF BINARY\n\x00\x01\x02\xff", "counts"),
    "no counts": ("OFF\n", "counts"),
    "bad counts": ("OFF\nfour two 0\n0 0 0\n", "counts"),
    "negative counts": ("OFF\n-4 2 0\n0 0 0\n", "counts"),
    "no vertices": ("OFF\n0 0 0\n", "no vertices"),
    "no faces": ("OFF\n1 0 0\n0 0 0\n", "no faces"),
    "truncated vertices": ("OFF\n4 2 0\n0 0 0\n1 0 0\n", "truncated"),
    "truncated faces": ("OFF\n" + SQUARE.replace("3 0 2 3\n", ""), "truncated"),
    "truncated row of a vertex": ("OFF\n" + SQUARE.replace("1 1 0\n", "1 1\n"), "vertex 2"),
    "truncated row of a face": ("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 2"), "face 1"),
    "quad that lacks a corner": ("OFF\n" + SQUARE.replace("3 0 2 3", "4 0 2 3"), "face 1"),
    "word for a number": ("OFF\n" + SQUARE.replace("1 1 0\n", "1 one 0\n"), "vertex 2"),
    "word for a corner": ("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 b 3"), "face 1"),
    "NaN": ("OFF\n" + SQUARE.replace("1 1 0\n", "1 nan 0\n"), "vertex 2 is not finite"),
    "infinity": ("OFF\n" + SQUARE.replace("1 0 0\n", "1e999 0 0\n"), "vertex 1 is not finite"),
    "corner beyond": ("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 2 4"), "refers to vertex 4 of 4"),
    "negative corner": ("OFF\n" + SQUARE.replace("3 0 2 3", "3 0 2 -1"), "refers to vertex -1"),
    "zero area": ("OFF\n3 1 0\n0 0 0\n1 1 1\n2 2 2\n3 0 1 2\n", "zero area"),
    "one point": ("OFF\n3 1 0\n1 1 1\n1 1 1\n1 1 1\n3 0 1 2\n", "zero area"),
    "only edges": ("OFF\n2 1 0\n0 0 0\n1 0 0\n2 0 1\n", "zero area"),
    "too large": ("OFF\n" + SQUARE.replace("1 1 0\n", "1e31 1 0\n"), "coordinates reach 1e\\+31"),
    "too far away": ("OFF\n" + SQUARE.replace(" 0\n", " 1e31\n"), "coordinates reach 1e\\+31"),
    "face of no corner": ("OFF\n" + SQUARE.replace("3 0 2 3", "0"), "face 1"),
    "face of fewer than no corners": ("OFF\n" + SQUARE.replace("3 0 2 3", "-3 0 2 3"), "face 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    text, fault = BROKEN[case]
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=fault) as caught:
        read_off(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy


def test_every_prefix_of_a_file_is_refused_or_whole(tmp_path: Path) -> None:
    text = "OFF\n" + SQUARE
    for length in range(len(text) - 2):
        with pytest.raises(DataError):
            read_off(written(tmp_path, text[:length]))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_off(tmp_path / "none.off")
    with pytest.raises(DataError, match="cannot be read"):
        read_off(tmp_path)


def test_write_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    mesh = trimesh.creation.box()
    (tmp_path / "file").touch()
    with pytest.raises((FileExistsError, NotADirectoryError)):
        write_off(mesh, tmp_path / "file" / "a.off")
    (tmp_path / "b.off").mkdir()
    with pytest.raises(IsADirectoryError):
        write_off(mesh, tmp_path / "b.off")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.off", "file"]


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
