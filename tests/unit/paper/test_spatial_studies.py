"""The chapters of samples that ranks share: their jobs, cells, ratios and curves."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.measured_steps import BIGCONV, CONVNEXT_TP
from sparsepipe.paper.printed import printed
from sparsepipe.runs.ledger_table import Row
from sparsepipe.tasks.measure_steps import outcome
from tests.support.report_cases import cell, value
from tests.support.reported_runs import made_by

WHOLE, HALF = (64, 128), (64, 64)
MB = 1_000_000


def measured(*overrides: str, name: str, ranks: int = 1, over: bool = False, **more: Any) -> Row:
    """A run on two sizes, whose memory is shared out."""
    sizes = [
        {
            "size": list(size),
            "peak_bytes": peak // ranks + MB,
            "saved_bytes": peak // ranks,
            "fits": not (over and size == WHOLE),
            "limited_by": "over_budget" if over and size == WHOLE else None,
            "step_s": peak / ranks / 100 / MB,
        }
        for size, peak in ((HALF, 8 * MB), (WHOLE, 16 * MB))
    ]
    usual = {"hardware_accelerator": "cpu", "machine_cores": 2, "threads_per_rank": 1}
    words = (f"experiment={name}", "paper.extent=desk", *overrides)
    found = {**outcome(sizes), "budget_bytes": 12 * MB, **usual, **more}
    model = "cnn2d" if name == "bigconv" else "convnext_tiny"
    own = {"ranks": ranks, "run_id": f"on{ranks}", "model": model}
    return {**made_by(*words, **found), **own}


def convnext(ranks: int, **more: Any) -> Row:
    words = (f"parallel.devices={ranks}", "model.checkpointing=false")
    return measured(*words, name="convnext_tp", ranks=ranks, over=ranks == 1, **more)


def test_only_what_is_known_of_print_counts_as_printed() -> None:
    assert [row["time_ms"] for row in printed("convnext_tp")] == ["937", "952", "647"]
    workers: dict[str, list[int]] = {}
    for row in printed("bigconv"):
        workers.setdefault(row["network"], []).append(int(row["workers"]))
    assert (workers["cnn1d"], workers["cnn2d"]) == ([1, 6, 12], [1, 5, 10])
    assert (workers["cnn3d"], workers["fcn2d"]) == ([1, 9, 28], [1, 10])


def test_memory_stands_beside_its_share_and_the_largest_size_beside_that_of_one() -> None:
    network = ("paper/network=cnn2d", "paper.workers=one")
    shared = ("paper/network=cnn2d", "parallel.devices=4", "parallel.grid=[2,2]")
    rows = [
        measured(*network, name="bigconv", over=True),
        measured(*shared, name="bigconv", ranks=4),
    ]
    memory, largest = BIGCONV.blocks(rows)
    assert memory.title == "scale desk"
    assert value(memory, "memory", "cnn2d", "64 x 128 pixels", "1") == pytest.approx(17)
    assert value(memory, "over_one", "cnn2d", "64 x 128 pixels", "4") == pytest.approx(5 / 17)
    assert value(memory, "share", "cnn2d", "64 x 128 pixels", "4") == 0.25
    assert value(memory, "within", "cnn2d", "64 x 128 pixels", "1") == "no, not trained"
    assert value(memory, "within", "cnn2d", "64 x 128 pixels", "4") == "yes"
    assert value(largest, "largest", "cnn2d", "largest", "1") == "64 x 64 pixels"
    four = cell(largest, "largest", "cnn2d", "largest", "4").ours
    assert four is not None
    assert (four.value, four.note) == ("64 x 128 pixels", "none larger was tried")
    assert value(largest, "times_larger", "cnn2d", "largest", "4") == 2
    assert cell(memory, "memory", "cnn2d", "64 x 128 pixels", "5").missing
    assert BIGCONV.draw is not None
    assert BIGCONV.draw(memory) is not None
    assert BIGCONV.draw(largest) is None


def test_times_are_ratios_and_those_of_more_ranks_than_cores_are_no_scaling() -> None:
    blocks = CONVNEXT_TP.blocks([convnext(each) for each in (1, 2, 4)])
    memory, _, ratios = blocks
    printed_ratio = cell(ratios, "times", "-", "printed: 952 over 937 ms", "-")
    assert printed_ratio.paper is not None
    assert printed_ratio.paper.text == "1.02"
    strong, weak = (
        "strong: 64 x 128 pixels over 64 x 128 pixels on 1",
        "weak: 64 x 128 pixels over 64 x 64 pixels on 1",
    )
    assert value(ratios, "times", "none", strong, "2") == pytest.approx(0.5)
    assert value(ratios, "times", "none", weak, "2") == pytest.approx(1.0)
    four = cell(ratios, "times", "none", strong, "4").ours
    assert four is not None
    assert (four.value, four.note) == ("no scaling", "no scaling: 4 ranks share 2 cores")
    step = cell(memory, "step", "none", "64 x 128 pixels", "4").ours
    assert step is not None
    assert step.value == pytest.approx(40)
    assert step.note.startswith("no scaling")
    assert CONVNEXT_TP.draw is not None
    assert all(CONVNEXT_TP.draw(block) is not None for block in (memory, ratios))


def test_a_size_without_memory_is_words_and_the_largest_is_the_one_before() -> None:
    found = outcome(
        [
            {"size": [8], "peak_bytes": 5, "fits": True, "limited_by": None},
            {"size": [16], "peak_bytes": None, "fits": False, "limited_by": "out_of_memory"},
        ]
    )
    assert (found["largest_size"], found["refused_size"]) == ([8], [16])
    assert (found["limited_by"], found["step_memory_bytes"]) == ("out_of_memory", 5)
    row = {**convnext(1), **found}
    memory = CONVNEXT_TP.blocks([row])[0]
    assert value(memory, "memory", "none", "16 values", "1") == "out of memory"
