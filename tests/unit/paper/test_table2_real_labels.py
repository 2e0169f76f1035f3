"""Table II on point clouds with real labels: what is trained, and reports on both kinds of data."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sparsepipe.launch.job import run_job
from sparsepipe.runs.ledger import gather
from tests.support.command_line import composed
from tests.support.reported_runs import batch_of, leave, made_by

SWEEP = ("experiment=table2", "scale=desk", "data.resolution=32", "data=modelnet40_points")
SPARSE = ("32³", "1", "sparse", "1")


def test_its_half_at_32_trains_on_all_1024_points_of_each_shape_or_a_share_of_them() -> None:
    found = set()
    for job in batch_of(*SWEEP, "data.root=there"):
        config = composed(*job)
        data, devices = config.data.arguments, config.parallel.devices
        assert data["source"]["_target_"] == "sparsepipe.data.sources.NpzBundle"
        assert (data["root"], data["resolution"], data["span"]) == ("there", 32, "extent")
        assert data["num_points"] is None
        assert data["augment"]["enabled"] is False
        assert data["batch_size"] * (devices if devices == 4 else 1) == 16
        assert (config.model.get("width"), config.trainer.max_epochs) == (0.25, 4)
        task = config.task.locate().name
        found.add((task, devices, config.representation, data["point_ratio"]))
    networks = [("dense", 1.0), ("sparse", 1.0), ("sparse", 0.5), ("sparse", 0.25)]
    assert found == {
        (*kind, *network)
        for kind in (("train", 1), ("train", 4), ("fit_batch", 1))
        for network in networks
    }


@pytest.fixture
def recorded(workplace: Path) -> Path:
    """A ledger of runs on both kinds of data, in a directory of its own."""
    for data, test, more in (
        ((), 0.9, {"train_shapes": 4000}),
        (("data=modelnet40_points",), 0.6, {"train_shapes": 9843}),
    ):
        for trial in ("one_device", "largest_batch"):
            words = (*SWEEP[:3], *data, f"paper/trial={trial}", "paper/network=sparse")
            told = {**made_by(*words, **more), "test/accuracy": test}
            places = ("run_id", "data.root", "data.cache_dir")  # which no result tells
            known = {key: value for key, value in told.items() if key not in places}
            leave(workplace / "runs", f"{trial}{test}", **known)
    there = workplace / "experiments/table2_modelnet40"
    gather(workplace / "runs/table2", to=there)
    return there


def rows_of_report(recorded: Path, *more: str) -> list[dict[str, str]]:
    words = ("task=report", "experiment=table2", f"task.where={recorded}")
    done = run_job(composed(*words, *more))
    with (done.path / "table2.csv").open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.full
@pytest.mark.parametrize("asked", [(), ("scale=desk",)])
def test_a_ledger_of_both_has_a_table_of_each(recorded: Path, asked: tuple[str, ...]) -> None:
    rows = rows_of_report(recorded, *asked)
    found = {}
    for row in rows:
        place = (row["grid"], row["devices"], row["network"], row["p"])
        if (place, row["quantity"]) == (SPARSE, "test_accuracy"):
            found[row["setting"]] = (float(row["ours"]), row["averaged"])
    (shapes, points) = found
    assert shapes.startswith("scale desk; generated shapes, 4,096 points;")
    assert points.startswith("scale desk; ModelNet40 as point clouds, all their points; 9,843 ")
    assert found == {shapes: (90.0, "1"), points: (60.0, "1")}
    assert {row["setting"] for row in rows} == {shapes, points}
    there = [row for row in rows if row["quantity"] == "batch" and row["status"] == "there"]
    assert {row["setting"] for row in there} == {shapes, points}, "each has its own search"
