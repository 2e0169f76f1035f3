"""Runs that did not come about alike: told apart, or named where they are averaged."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.table1 import TABLE1
from sparsepipe.runs.ledger_table import Row
from tests.support.report_cases import cell, run, value


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
        f"Xeon, measured here, 2 threads: runs a, b {words} in {key}: the mean is over all",
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
