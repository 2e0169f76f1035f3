"""Runs that did not come about alike: told apart, or named where they are averaged."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.fig7 import FIG7
from sparsepipe.paper.chapters.pipeline_depth import PIPELINE_DEPTH
from sparsepipe.paper.chapters.table1 import TABLE1
from sparsepipe.report.chapter import Row
from tests.support.report_cases import cell, run, value
from tests.unit.paper.test_depth_runs import emulated


def measured(flops: float, **more: Any) -> Row:
    values = {"flops_per_s": flops, "measured_device": "Xeon", "threads_per_rank": 2}
    return run("table1", "table1", **{**values, "task.repeats": 20, "task.warmups": 3, **more})


@pytest.mark.parametrize(
    ("key", "other"), [("task.repeats", 2), ("task.warmups", 0), ("torch", "2.11.0")]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_table1_names_what_its_means_are_of(key: str, other: Any, seed: int) -> None:
    rows = [measured(1e11, run_id="a"), measured(3e11, run_id="b", seed=seed, **{key: other})]
    (block,) = TABLE1.blocks(rows)
    place = ("Xeon", "measured here, 2 threads")
    assert value(block, "tflops", *place) == pytest.approx(0.2)
    words = "all have seed 0 and differ" if seed == 0 else "differ"
    assert block.notes == (
        f"Xeon, measured here, 2 threads: runs a, b {words} in {key}: the mean is of all",
    )


def test_table1_says_nothing_of_runs_that_differ_in_their_seeds() -> None:
    (block,) = TABLE1.blocks([measured(1e11), measured(3e11, seed=1, git_commit="def456")])
    assert cell(block, "tflops", "Xeon", "measured here, 2 threads").ours.count == 2
    assert block.notes == ()


def test_threads_of_a_gpu_of_the_papers_are_named() -> None:
    gpu = {"measured_device": "TITAN V", "hardware_accelerator": "cuda"}
    rows = [measured(1e13, **gpu), measured(1e13, seed=1, **{**gpu, "threads_per_rank": 1})]
    (block,) = TABLE1.blocks(rows)
    (note,) = block.notes
    assert note.startswith("TITAN V, server ")
    assert "differ in threads_per_rank" in note


@pytest.mark.parametrize("key", ["trainer.limit_train_batches", "model.kernel_size"])
def test_the_study_of_depth_names_what_its_means_are_of(key: str) -> None:
    """Where nobody knows what is usual, so that no run is told by its overrides."""
    runs = [emulated(1, 100.0, run_id="a", **{key: 8}),
            emulated(1, 300.0, run_id="b", seed=1, **{key: 12})]  # fmt: skip
    (block,) = PIPELINE_DEPTH.blocks(runs)
    assert block.notes == (
        f"1, emulated, serial, -: runs a, b differ in {key}: the mean is of all",
    )
    (alike,) = PIPELINE_DEPTH.blocks([emulated(1, 100.0), emulated(1, 300.0, seed=1)])
    assert alike.notes == ()


def profiled(**more: Any) -> Row:
    costs = dict.fromkeys(
        ("layers_compute_s", "layers_activation_bytes", "layers_parameter_bytes"), [1.0] * 52
    )
    values = {
        "data.source._target_": "sparsepipe.data.sources.GeneratedShapes",
        "data.num_points": 4096,
        "data.resolution": 50,
        "data.batch_size": 8,
        "model.width": 0.25,
        "threads_per_rank": 2,
        **costs,
    }
    return run("profile", "fig7", **{**values, **more})


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("scale", "smoke"),
        ("data.source._target_", "sparsepipe.data.sources.NpzBundle"),
        ("data.num_points", 1024),
        ("threads_per_rank", 1),
        ("task.num_measured", 3),
        ("run_id", "another"),
    ],
)
def test_every_profile_of_fig7_has_a_title_of_its_own(key: str, other: Any) -> None:
    one, two = FIG7.blocks([profiled(run_id="a"), profiled(**{"run_id": "b", key: other})])
    assert one.title != two.title
    told = {"data.num_points": "1,024 points", "threads_per_rank": "; 1 thread a device"}
    assert told.get(key, "") in two.title
    assert "2 threads a device" in one.title


def test_settings_that_several_profiles_share_do_not_name_one() -> None:
    measured = {"a": 5, "b": 5, "c": 7}
    blocks = FIG7.blocks(
        [profiled(**{"run_id": run_id, "task.num_measured": n}) for run_id, n in measured.items()]
    )
    ends = [block.title.split("; ")[-2:] for block in blocks]
    assert ends[0] == ["task.num_measured=5", "run a"]
    assert ends[1] == ["task.num_measured=5", "run b"]
    assert ends[2][-1] == "task.num_measured=7"
