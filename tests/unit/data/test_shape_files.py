"""One shape from one file: the formats against each other, and files that hold none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh

from sparsepipe.data.shape_files import parse_points, read_shape
from sparsepipe.errors import DataError

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
    delimiter: str, header: str = "", columns: tuple[int, ...] = (0, 1, 2), comma: bool = False
) -> Callable[[Path], None]:
    """Writes the cloud's columns, and a fourth one of -5."""

    def write(path: Path) -> None:
        values_Q4 = np.hstack([CLOUD_Q3, np.full((700, 1), -5.0)])[:, columns]
        rows = [delimiter.join(f"{value:.9g}" for value in row) for row in values_Q4]
        joined = "\n".join(rows)
        path.write_text(header + (joined.replace(".", ",") if comma else joined) + "\n\n")

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
    "decimal commas": ("csv", text(";", "X;Y;Z\n", comma=True)),
    "decimal commas between tabs": ("txt", text("\t", comma=True)),
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


def lying_npy(path: Path) -> None:
    """A header of 1e12 points, and nothing behind it."""
    with path.open("wb") as file:
        header: dict[str, Any] = {"descr": "<f8", "fortran_order": False, "shape": (10**12, 3)}
        np.lib.format.write_array_header_1_0(file, header)


def write_large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)  # a sparse file


def half_of(file_type: str) -> Callable[[Path], object]:
    raw = trimesh.creation.icosphere(1).export(file_type=file_type)
    raw = raw if isinstance(raw, bytes) else raw.encode()
    return lambda path: path.write_bytes(raw[: len(raw) // 2])


NO_SHAPES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no format": ("mtl", lambda path: path.write_text("newmtl red"), "of no format"),
    "missing": ("stl", lambda path: None, "does not exist"),
    "a pipe": ("npz", os.mkfifo, "is a pipe, not a regular file"),
    "a pipe as a mesh": ("off", os.mkfifo, "is a pipe, not a regular file"),
    "an endless device": ("txt", lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "a folder": ("ply", lambda path: path.mkdir(), "is a directory"),
    "a large file": ("stl", write_large, "more than the 1,024 MiB"),
    "large text": ("csv", write_large, "more than the 256 MiB"),
    "lies in its header": ("npy", lying_npy, r"as NPY, and may be .* \(ValueError: mmap length"),
    "objects": ("npy", lambda path: np.save(path, np.array([{}] * 3)), "holds no shape"),
    "an array the other way round": ("npy", lambda path: np.save(path, CLOUD_Q3.T), "transpose it"),
    "several arrays": (
        "npz",
        lambda path: np.savez(path, a=CLOUD_Q3, b=CLOUD_Q3),
        "no array points",
    ),
    "names": ("npy", lambda path: np.save(path, np.array([["a", "b", "c"]])), "of shape"),
    "prose": ("txt", lambda path: path.write_text("A list of parts.\n" * 30), "at least three"),
    "binary text": ("csv", lambda path: path.write_bytes(bytes(range(256))), "holds no shape"),
    "two columns": ("xyz", lambda path: path.write_text("1 2 3\n4 5\n"), "holds no shape"),
    "infinite": ("xyz", lambda path: path.write_text("1e400 2 3\n"), "not finite"),
    "overflowing": (
        "xyz",
        lambda path: path.write_text("1e308 2 3\n"),
        "coordinates reach 1e\\+308",
    ),
    "flat vertices": (
        "obj",
        lambda path: path.write_text("v 0 0\nv 1 0\nv 0 1\nf 1 2 3\n"),
        "shape",
    ),
    "half a PLY": ("ply", half_of("ply"), "cannot be read as PLY, and may be damaged or cut off"),
    "half an STL": ("stl", half_of("stl"), "it has no points; it may be empty, cut off or"),
    "half a text STL": ("stl", half_of("stl_ascii"), "it has no points; it may be empty, cut off"),
    "empty": ("obj", lambda path: path.touch(), "holds no shape"),
    "no surface": (
        "obj",
        lambda path: path.write_text("v 0 0 0\nv 1 1 1\nf 1 2 2\n"),
        "its mesh has no surface",
    ),
}


@pytest.mark.parametrize("kind", NO_SHAPES)
def test_files_without_a_shape(tmp_path: Path, kind: str) -> None:
    suffix, write, message = NO_SHAPES[kind]
    path = tmp_path / f"thing.{suffix}"
    write(path)
    with pytest.raises(DataError, match=message) as caught:
        read_shape(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy


WORDS = (b"1e400", b"nan", b"-1", b"4294967295", b"\x00" * 8, b"\xff" * 8, b"[[[[", b"\xed\xb3\xbf")


def mutated(raw: bytes, rng: np.random.Generator) -> bytes:
    """A file with some bytes changed, left out, put in or said twice, mostly in its header."""
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(min(len(raw), 400) if rng.random() < 0.6 else len(raw)))
        word = WORDS[rng.integers(len(WORDS))]
        parts = {
            0: (raw[:at], bytes([rng.integers(256)]), raw[at + 1 :]),
            1: (raw[: at + 1],),
            2: (raw[:at], word, raw[at + len(word) :]),
            3: (raw[:at], word, raw[at:]),
            4: (raw[:at], raw[at + int(rng.integers(1, 40)) :] or b"\n"),
            5: (raw, raw[:at]),
        }
        raw = b"".join(parts[int(rng.integers(len(parts)))])
    return raw


@pytest.mark.parametrize("suffix", ["stl", "obj", "ply", "glb", "off", "npy", "npz", "csv"])
def test_malformed_files_are_read_or_refused(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(7)
    path, whole = tmp_path / f"part.{suffix}", trimesh.creation.icosphere(1)
    if suffix in ("npy", "npz", "csv"):
        CLOUDS[{"csv": "commas, names"}.get(suffix, suffix)][1](path)
    else:
        whole.export(path)
    raw = path.read_bytes()
    refused = list[DataError]()
    for _ in range(60):
        path.write_bytes(mutated(raw, rng))
        try:
            shape = read_shape(path)
            assert np.isfinite(shape).all()
            assert shape.shape[1:] in ((3,), (3, 3))
        except DataError as error:
            refused.append(error)
    assert refused
    assert all(str(path) in error.message and error.remedy for error in refused)


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("1 2 3,255\n4 5 6,7\n", [[1, 2, 3], [4, 5, 6]]),
        ("0 0 0,5\n1.5 2 3,5\n", [[0, 0, 0], [1.5, 2, 3]]),
        ("0,5 1 2,5\n1,5 2 3\n", [[0.5, 1, 2.5], [1.5, 2, 3]]),
        ("1;2;3,5\n1;2;3\n", [[1, 2, 3.5], [1, 2, 3]]),
        ("1,2,3\n4,5,6\n", [[1, 2, 3], [4, 5, 6]]),
    ],
)
def test_commas_mean_the_same_in_all_lines_of_a_file(text: str, points: list[list[float]]) -> None:
    assert parse_points(text).tolist() == points
