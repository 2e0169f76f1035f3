"""The best of finished runs, from their directories and from ledgers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import ConfigError, NoRunsError
from sparsepipe.results import best, gather
from sparsepipe.runs.best import best_of, mode_of

FIGURES: dict[str, dict[str, Any]] = {
    "a" * 12: {"val/accuracy": 0.5, "val/loss": 0.1, "test/accuracy": 1.0},
    "b" * 12: {"val/accuracy": 0.75, "val/loss": 0.3, "test/accuracy": 0.25},
    "c" * 12: {"val/accuracy": 0.75, "val/loss": float("nan"), "test/accuracy": 0.5},
    "d" * 12: {"simulated_shapes_per_s": 3.0},
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("best") / "outputs"
    for run_id, figures in FIGURES.items():
        run = place / "first" / run_id
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.yaml").write_text("name: first\n")
        told = {"run_id": run_id, "name": "first", "kind": "measured", **figures}
        (run / "result.json").write_text(json.dumps(told).replace("NaN", "null"))
        (run / "DONE.json").write_text(json.dumps({"time": 1e9}))
    for name in ("best", "last"):
        (place / "first" / ("a" * 12) / "checkpoints" / f"{name}.ckpt").touch()
    (place / "first" / ("b" * 12) / "checkpoints" / "last.ckpt").touch()
    gather(place / "first")
    return place


@pytest.mark.parametrize("place", ["", "first", "first/ledger.csv", "first/ledger.parquet"])
def test_the_best_by_the_validation_and_its_checkpoint(outputs: Path, place: str) -> None:
    found = best(outputs / place)
    assert found.directory == outputs / "first" / ("b" * 12)
    assert found.checkpoint == found.directory / "checkpoints" / "last.ckpt", "no best one is kept"
    assert (found.value, found.result["test/accuracy"], found.same) == (0.75, 0.25, 1)


def test_another_figure_has_to_be_named(outputs: Path) -> None:
    least = best(outputs, objective="val/loss")
    assert least.directory is not None
    assert (least.directory.name, least.value) == ("a" * 12, 0.1)
    assert least.checkpoint == least.directory / "checkpoints" / "best.ckpt"
    assert best(outputs, objective="val/loss", mode="max").value == 0.3
    assert best(outputs, objective="test/accuracy").value == 1.0
    simulated = best(outputs, objective="simulated_shapes_per_s", experiment="first")
    assert (simulated.value, simulated.checkpoint) == (3.0, None)


def test_a_ledger_that_is_kept_elsewhere_names_no_directory(outputs: Path, tmp_path: Path) -> None:
    gather(outputs / "first", to=tmp_path / "kept")
    found = best(tmp_path / "kept")
    assert (found.directory, found.checkpoint) == (None, None)
    assert found.result["run_id"] == "b" * 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "val/acuracy"}, "has val/acuracy (nearest: 'val/accuracy')"),
        ({"objective": "val/mean_iou"}, "data.val_share"),
        ({"mode": "maximum"}, "'max' or 'min'"),
    ],
)
def test_refused(outputs: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        best(outputs, **arguments)
    assert message in str(refused.value)
    assert "test/" not in str(refused.value), "which nobody is to be led to"


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(NoRunsError):
        best(tmp_path)


def results(*values: Any) -> list[dict[str, Any]]:
    return [{"v": value} for value in values]


def test_figures_by_their_names() -> None:
    smaller = ["val/loss", "val/error", "epoch_time_s", "test_time_s", "peak_memory_bytes"]
    smaller += ["bottleneck_s", "bubble_share"]
    larger = ["val/accuracy", "val/mean_iou", "train_shapes_per_s", "flops_per_s", "best_monitored"]
    assert {mode_of(key) for key in smaller} == {"min"}
    assert {mode_of(key) for key in larger} == {"max"}
    assert best_of(results(None, float("nan"), True, "2"), "v", mode="max") == []
    assert best_of(results(1, 3.0, None, 3, float("inf")), "v", mode="max") == [1, 3]
    diverged = {"v": 4, "nonfinite": "the loss is nan in epoch 1, batch 1"}
    assert best_of([diverged, *results(1, 3)], "v", mode="max") == [2]


def test_of_equal_runs_the_one_that_was_begun_first_is_the_best() -> None:
    begun = [None, "2026-11-27T23:21:55+00:00", "2026-11-27T23:21:44+00:00"]
    ids = "abcd"
    equal = [{"v": 1, "started_at": s, "run_id": ids[n]} for n, s in enumerate([*begun, begun[2]])]
    assert best_of(equal[::-1], "v", mode="min") == [1, 0, 2, 3], "by their ids within a second"
