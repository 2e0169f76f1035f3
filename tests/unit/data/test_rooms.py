"""Generated rooms: rays against every triangle, labels against places, files against trimesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trimesh

from sparsepipe.data import GeneratedRooms
from sparsepipe.data.cache import CacheSettings
from sparsepipe.data.scenes.reader import SceneReader
from sparsepipe.data.scenes.rooms import ROOM_CLASSES, make_room
from sparsepipe.data.scenes.scanner import cast_rays


def source(root: Path, **settings: int) -> GeneratedRooms:
    counts = {"train_rooms": 2, "test_rooms": 1, **settings}
    cache = CacheSettings(directory=root / "cache")
    return GeneratedRooms(root / "rooms", reader=SceneReader(), cache=cache, **counts)


@pytest.mark.parametrize("seed", range(4))
def test_rays_meet_the_nearest_of_all_triangles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    corners_T33 = rng.normal(0, 3, (40, 1, 3)) + rng.normal(0, 1.5, (40, 3, 3))
    corners_T33[0] = [[-5, -4, -2], [6, -4, -2.5], [0, 7, -3]]  # below the station
    corners_T33[1] = [[-1, -1, 4], [2, -1, 4], [0, 2, 5]]  # above it
    azimuth_A, elevation_E = 0.1 + np.arange(60) * 2 * np.pi / 60, np.linspace(-1.5, 1.55, 31)
    up_R, around_R = (each.ravel() for each in np.meshgrid(elevation_E, azimuth_A, indexing="ij"))
    flat_R = np.cos(up_R)
    rays_R3 = np.stack([flat_R * np.cos(around_R), flat_R * np.sin(around_R), np.sin(up_R)], 1)
    # Solves origin + t ray = a + u (b - a) + v (c - a) for each pair.
    a, b, c = corners_T33.transpose(1, 0, 2)
    columns = [np.broadcast_to(each, (len(rays_R3), 40, 3)) for each in (b - a, c - a)]
    matrix = np.stack([rays_R3[:, None] + 0 * a, -columns[0], -columns[1]], axis=3)
    t, u, v = np.moveaxis(
        np.linalg.solve(matrix, np.broadcast_to(a, (len(rays_R3), 40, 3))[..., None])[..., 0], 2, 0
    )
    expected_RT = np.where((t > 0) & (u > 0) & (v > 0) & (u + v < 1), t, np.inf)
    range_R, triangle_R = cast_rays(corners_T33, rays_R3, azimuth_A, elevation_E)
    np.testing.assert_allclose(range_R, expected_RT.min(axis=1), rtol=1e-9)
    is_met_R = np.isfinite(range_R)
    assert 0.3 < is_met_R.mean() < 1
    assert (triangle_R == expected_RT.argmin(axis=1))[is_met_R].all()


def test_labels_are_where_such_things_are() -> None:
    found = set[int]()
    for number in range(12):
        room = make_room(np.random.default_rng([3, number]))
        height_P, up_P, label_P = room["coord"][:, 2], room["normal"][:, 2], room["label"]
        assert 15_000 < len(label_P) < 120_000
        assert {values.shape for values in room.values()} == {(len(label_P), 3), (len(label_P),)}
        np.testing.assert_allclose(np.linalg.norm(room["normal"], axis=1), 1, atol=1e-5)
        assert 0 <= room["color"].min() <= room["color"].max() <= 1
        low, high = (np.quantile(height_P, share) for share in (0.002, 0.998))
        for name, height, up in (("floor", low, 1), ("ceiling", high, -1)):
            is_flat_P = label_P == ROOM_CLASSES.index(name)
            assert abs(np.median(height_P[is_flat_P]) - height) < 0.05
            assert np.median(up_P[is_flat_P]) * up > 0.95
        assert abs(np.median(up_P[label_P == ROOM_CLASSES.index("wall")])) < 0.1
        found |= {*label_P.tolist()}
    assert found == {*range(13)}


def test_files_are_what_trimesh_reads_and_missing_ones_are_made_again(tmp_path: Path) -> None:
    rooms = source(tmp_path)
    assert rooms.classes == ROOM_CLASSES
    files = [Path(file) for split in ("train", "test") for file in rooms.load(split).files]
    contents = [file.read_bytes() for file in files]
    assert len({*contents}) == 3
    raw = trimesh.load(files[1]).metadata["_ply_raw"]["vertex"]["data"]
    made = make_room(np.random.default_rng([0, 0, 2]))
    np.testing.assert_array_equal(np.column_stack([raw[name] for name in "xyz"]), made["coord"])
    np.testing.assert_array_equal(
        np.column_stack([raw["nx"], raw["ny"], raw["nz"]]), made["normal"]
    )
    colors = np.column_stack([raw["red"], raw["green"], raw["blue"]]) / 255
    np.testing.assert_allclose(colors, made["color"], atol=0.5 / 255 + 1e-6)
    np.testing.assert_array_equal(raw["label"], made["label"])
    scene = rooms.load("train").read(1)
    np.testing.assert_array_equal(scene.coords_P3 + scene.origin_3, made["coord"])
    np.testing.assert_array_equal(scene.labels_P, made["label"])

    files[0].unlink()
    again = source(tmp_path, train_rooms=3)
    assert len(again.load("train").files) == 3
    assert [file.read_bytes() for file in files] == contents
    assert again.fingerprint() != rooms.fingerprint() == source(tmp_path / "other").fingerprint()
    assert source(tmp_path, seed=1).load("test").files != source(tmp_path).load("test").files
