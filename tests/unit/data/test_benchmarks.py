"""The benchmarks run, and what they measure holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(name: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.full
def test_the_data_benchmark_prints_its_figures() -> None:
    sizes = ["--train=1", "--test=1", "--batch-size=4", "--steps=1", "--seconds=0.1"]
    said = run("data.py", *sizes, "--width=0.05", "--workers=0")
    assert re.search(r"cache build: 40 meshes in [\d.]+ s, \d+ meshes/s", said)
    assert "mean over 20 test shapes" in said
    rows = re.findall(r"(\d+)\^3, batch +4 +([\d.]+)% +[\d.]+% +(\d+) +([\d.]+) +(\d+)x", said)
    assert [row[0] for row in rows] == ["32", "50"]
    for _, occupied, loaded, trained, _ in rows:
        assert 0 < float(occupied) < 20
        assert float(loaded) > 0
        assert float(trained) > 0
    assert re.search(r"goal, .* 3x ahead of training: (met|MISSED)", said)


@pytest.mark.full
def test_occupancy_of_shapes_and_of_a_bundle(bundle: Path) -> None:
    said = run("occupancy.py", "--test=1", f"--bundle={bundle}")
    rows = re.findall(r"^(\w+) +(\d+) +([\d,]+) +(\d+)\^3 +([\d,]+) +([\d.]+)%", said, re.MULTILINE)
    assert [row[:4] for row in rows] == [
        ("shapes", "20", "4,096", "32"),
        ("shapes", "20", "4,096", "50"),
        ("bundle", "7", "128", "32"),
        ("bundle", "7", "128", "50"),
    ]
    points_SP3 = np.load(bundle / "test.npz")["points"].astype(float)
    low_S3, high_S3 = points_SP3.min(axis=1, keepdims=True), points_SP3.max(axis=1, keepdims=True)
    for _, _, points, grid, voxels, occupied in rows:
        counted = int(voxels.replace(",", ""))
        assert counted <= int(points.replace(",", ""))
        assert counted / int(grid) ** 3 == pytest.approx(float(occupied) / 100, abs=1e-3)
        if points == "128":
            places = (points_SP3 - low_S3) / (high_S3 - low_S3) * int(grid)
            cells = [np.unique(np.floor(cloud), axis=0) for cloud in places]
            assert counted == pytest.approx(np.mean([len(cell) for cell in cells]), abs=4)


@pytest.mark.full
def test_gross_form_alone_stays_below_85_percent_in_full_size(tmp_path: Path) -> None:
    said = run("shapes_baseline.py", "--generate", str(tmp_path))
    assert "4000 train, 1040 test" in said
    found = re.search(r"accuracy +([\d.]+)%", said)
    assert found is not None
    assert 50 < float(found[1]) < 85


@pytest.mark.full
def test_baselines_of_rooms_are_far_from_perfect(tmp_path: Path) -> None:
    sizes = ["--train-rooms=6", "--test-rooms=2", "--neighbours", "1", "5"]
    said = run("rooms_baselines.py", "--data", str(tmp_path), *sizes)
    rows = dict(re.findall(r"^\| ([a-zA-Z ]+) \| (.*) \|$", said, re.MULTILINE))
    figures = {name: np.array(row.split(" | "), float) for name, row in rows.items()}
    means = figures.pop("mean IoU"), figures.pop("mean accuracy"), figures.pop("accuracy of points")
    assert len(figures) == 13
    np.testing.assert_allclose(means[0], np.nanmean([*figures.values()], axis=0), atol=0.1)
    assert (means[0] < 45).all()
    assert (figures["floor"] > 80).all()


@pytest.mark.full
def test_baselines_of_organs_are_far_from_perfect(tmp_path: Path) -> None:
    sizes = ["--train-cases=8", "--test-cases=2", "--spacing=6"]
    said = run("organs_baselines.py", "--data", str(tmp_path), *sizes)
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", said, re.MULTILINE))
    figures = {name: np.array(row.split(" | "), float) for name, row in rows.items()}
    mean = figures.pop("mean")
    assert len(figures) == 5
    np.testing.assert_allclose(mean, np.mean([*figures.values()], axis=0), atol=0.1)
    assert (mean < (40, 60, 75)).all()
    assert figures["liver"][2] > 60
