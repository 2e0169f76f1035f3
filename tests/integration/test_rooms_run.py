"""Rooms as users meet them: generated, trained on and tested with one command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trimesh

from sparsepipe.data.scenes.rooms import ROOM_CLASSES
from sparsepipe.utils.files import read_csv, read_json
from tests.support.command_line import rows


def test_the_experiment_counts_every_point_of_the_test_rooms(
    job: Callable[..., Path], workplace: Path
) -> None:
    small = ["data.voxel_size=0.2", "model.width=0.125", "trainer.max_epochs=2"]
    counts = ["data.source.train_rooms=3", "data.source.test_rooms=2", "data.batch_size=2"]
    run = job("experiment=rooms", *small, *counts, f"data.root={workplace}/rooms")
    result, files = read_json(run / "result.json"), sorted(workplace.rglob("test/room_*.ply"))
    assert [row["epoch"] for row in rows(run)] == ["0", "1"]
    labels_P = np.concatenate(
        [trimesh.load(file).metadata["_ply_raw"]["vertex"]["data"]["label"] for file in files]
    )
    found_K = np.bincount(labels_P.ravel(), minlength=13) > 0
    cells = read_csv(run / "confusion.csv", "actual", "predicted", "points")
    counts = dict.fromkeys(ROOM_CLASSES, 0)
    right = 0
    for cell in cells:
        counts[cell["actual"]] += int(cell["points"])
        right += int(cell["points"]) * (cell["actual"] == cell["predicted"])
    assert [*counts.values()] == np.bincount(labels_P.ravel(), minlength=13).tolist()
    assert result["test/accuracy"] == pytest.approx(right / len(labels_P))
    ious = [result[f"test/iou/{name}"] for name in np.array(ROOM_CLASSES)[found_K]]
    assert all(0 <= each <= 1 for each in ious)
