"""The study of microbatches: its jobs, and what its script makes of their results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import composed
from tests.support.reported_runs import drawn, jobs_of, leave_curves
from tests.support.resolved import resolved

NAME = "experiment=microbatches"
SCRIPT = Path(__file__).parents[3] / "experiments" / "microbatches" / "draw.py"
TWO = ("hardware.accelerator=cpu", "data.root=.")


def test_the_sweep_has_each_way_with_each_seed() -> None:
    ways = ("whole", "accumulated", "gpipe", "sync_1f1b")
    assert jobs_of(["-m", NAME]) == {
        frozenset({NAME, f"paper/trial=microbatches/{way}", f"seed={seed}"})
        for way in ways
        for seed in range(3)
    }


@pytest.mark.parametrize(
    ("way", "ranks", "schedule"),
    [("accumulated", 1, "1f1b"), ("gpipe", 2, "gpipe"), ("sync_1f1b", 2, "1f1b")],
)
def test_ways_in_parts_differ_in_devices_and_schedule_alone(
    way: str, ranks: int, schedule: str
) -> None:
    config = composed(NAME, f"paper/trial=microbatches/{way}", *TWO)
    whole = composed(NAME, "paper/trial=microbatches/whole", *TWO)
    strategy = config.parallel.strategy.arguments
    assert resolved(config).ranks == ranks
    assert (strategy["schedule"], strategy["microbatches"]) == (schedule, 4)
    assert strategy["keyed_randomness"] is True
    assert whole.parallel.strategy is None
    assert config.replace(parallel=whole.parallel) == whole.replace(parallel=whole.parallel)


def finished(outputs: Path, name: str, seed: int, accuracy: float, **told: Any) -> None:
    told = {"seed": seed, "test/accuracy": accuracy, **told}
    leave_curves(outputs / "microbatches" / name, told, 2 * [accuracy])


def test_pipelines_are_compared_with_accumulation_of_the_same_seed(tmp_path: Path) -> None:
    """And runs that are none of the study's are left out."""
    cut = {"parallel.strategy.microbatches": 4}
    for seed in (0, 1):
        finished(tmp_path, f"whole{seed}", seed, 0.5, strategy="single")
        finished(tmp_path, f"one{seed}", seed, 0.6, strategy="sync_1f1b", plan_config="1", **cut)
        finished(tmp_path, f"1f1b{seed}", seed, 0.6, strategy="sync_1f1b", plan_config="1-1", **cut)
    finished(tmp_path, "gpipe", 1, 0.7, strategy="gpipe", plan_config="1-1", **cut)
    finished(tmp_path, "other", 0, 0.1, strategy="gpipe", plan_config="1", **cut)
    finished(tmp_path, "found", 0, 0.1, strategy="gpipe hete_mp", plan_config="1-1", **cut)
    finished(tmp_path, "apart", 0, 0.1, strategy="dp")
    script = Path(shutil.copy(SCRIPT, tmp_path))  # it writes beside itself
    lines = [" ".join(line.split()) for line in drawn(tmp_path, script).stdout.splitlines()]
    same = "the same as one device, 4 microbatches, to the last bit of 1 final metrics"
    unlike = "unlike one device, 4 microbatches: test/accuracy 0.7 (0.6)"
    assert lines == [
        "one device, whole minibatches test/accuracy 2 runs 50.00 % [50.00 .. 50.00]",
        "one device, 4 microbatches test/accuracy 2 runs 60.00 % [60.00 .. 60.00]",
        "GPipe, two stages, 4 microbatches test/accuracy 1 runs 70.00 % [70.00 .. 70.00]",
        "1F1B, two stages, 4 microbatches test/accuracy 2 runs 60.00 % [60.00 .. 60.00]",
        f"GPipe, two stages, 4 microbatches seed 1: {unlike}",
        f"1F1B, two stages, 4 microbatches seed 0: {same}",
        f"1F1B, two stages, 4 microbatches seed 1: {same}",
    ]
    assert (tmp_path / "curves.png").exists()
