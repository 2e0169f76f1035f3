"""The study of depth from ledgers made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.depth_runs import DepthSetting
from sparsepipe.paper.chapters.pipeline_depth import PIPELINE_DEPTH
from sparsepipe.paper.printed import printed
from sparsepipe.report.chapter import Block, Row
from sparsepipe.report.layout import fill
from sparsepipe.report.writing import csv_rows
from tests.support.report_cases import cell, run, value

STRATEGIES = "sparsepipe.strategies"


def trained(depth: int, schedule: str = "", partition: str = "straight", **more: Any) -> Row:
    """As task=train leaves it; emulated where the kind says so."""
    way: dict[str, Any] = {"strategy": "single"}
    if depth > 1:
        name = "PipelineStrategy" if not schedule else "SynchronousPipelineStrategy"
        way = {
            "strategy": partition,
            "parallel.strategy._target_": f"{STRATEGIES}.{name}",
            "parallel.search.search": partition,
        }
        if schedule:
            way |= {"schedule": schedule, "parallel.strategy.microbatches": 32}
    is_emulated = more.get("kind") == "emulated"
    return run(
        "train_emulated" if is_emulated else "train",
        "pipeline_depth",
        **{
            "ranks": depth,
            "threads_per_rank": 1,
            "data.source._target_": "sparsepipe.data.DrawnDigits",
            "data.batch_size": 1024,
            "model.convolutions": 24,
            "model.width": 1.0,
            **way,
            **more,
        },
    )


def emulated(depth: int, rate: float, *way: str, **more: Any) -> Row:
    return trained(depth, *way, kind="emulated", samples_per_s=rate, **more)


def only(*rows: Row) -> Block:
    (block,) = PIPELINE_DEPTH.blocks(rows)
    return block


def test_the_studys_figures_are_in_every_row_of_their_depth() -> None:
    block = only()
    for row in printed("pipeline_depth"):
        theirs = {
            (found.paper.text, column.key)
            for labels, cells in block.rows.items()
            if labels[0] == row["pipelines"]
            for column, found in cells.items()
            if found.paper is not None
        }
        assert theirs == {
            (row["total_time_minutes"], "time"),
            (row["speedup"], "speedup"),
            (row["total_memory_mb"], "memory"),
            (row["extra_memory_factor"], "factor"),
        }


def test_runs_that_recompute_layers_are_of_no_row() -> None:
    serial = emulated(1, 200.0)
    kept = emulated(8, 1200.0, "gpipe")
    again = {**emulated(8, 900.0, "gpipe"), "recomputed_layers": "[[0, 23]]"}
    eight = ("8", "emulated", "GPipe", "ours")
    assert value(only(serial, kept, again), "speedup", *eight) == pytest.approx(6.0)


def test_speedups_are_over_the_serial_run_of_their_kind() -> None:
    block = only(
        trained(1, train_shapes_per_s=100.0),
        trained(2, "gpipe", "variance", train_shapes_per_s=175.0, bubble_share=0.04),
        emulated(1, 200.0, kept_bytes=400e6),
        emulated(8, 1200.0, "1f1b", kept_bytes=60e6, bubble_share=0.2),
        emulated(8, 1300.0, "eager_1f1b", kept_bytes=120e6),
    )
    assert value(block, "time", "1", "measured", "serial", "-") == pytest.approx(7.0)
    two = ("2", "measured", "GPipe", "variance")
    assert value(block, "speedup", *two) == pytest.approx(1.75)
    assert cell(block, "speedup", *two).compared == pytest.approx(1.75 / 1.71)
    assert value(block, "bubble", *two) == pytest.approx(4.0)
    assert value(block, "ideal", *two) == pytest.approx(100 / 33)
    eight = ("8", "emulated", "1F1B", "ours")
    assert value(block, "speedup", *eight) == pytest.approx(6.0)
    assert value(block, "ideal", *eight) == pytest.approx(700 / 39)
    assert value(block, "memory", *eight) == pytest.approx(60)
    assert value(block, "factor", *eight) == pytest.approx(0.15)
    eager = ("8", "emulated", "eager 1F1B", "ours")
    assert value(block, "speedup", *eager) == pytest.approx(6.5)
    assert value(block, "ideal", *eager) == pytest.approx(700 / 39)
    assert value(block, "memory", "1", "measured", "serial", "-") == pytest.approx(400)


def test_bubbles_of_stages_that_are_alike() -> None:
    assert DepthSetting(microbatches=4).ideal_bubble(1) == 0
    assert DepthSetting(microbatches=32).ideal_bubble(8) == pytest.approx(7 / 39)


def test_the_asynchronous_pipeline_has_no_formula_to_reach() -> None:
    block = only(emulated(1, 200.0), emulated(4, 780.0, bubble_share=0.02))
    row = ("4", "emulated", "asynchronous", "ours")
    assert value(block, "speedup", *row) == pytest.approx(3.9)
    assert not cell(block, "ideal", *row).missing
    assert value(block, "ideal", *row) is None


def test_two_processes_on_the_cores_of_one_are_no_speedup() -> None:
    block = only(
        trained(1, train_shapes_per_s=100.0, threads_per_rank=2),
        trained(2, "gpipe", train_shapes_per_s=120.0),
    )
    assert value(block, "speedup", "2", "measured", "GPipe", "ours") == "no speedup"


def test_other_sizes_have_a_table_of_their_own() -> None:
    other = {"data.batch_size": 64}
    blocks = PIPELINE_DEPTH.blocks([emulated(1, 200.0), emulated(1, 150.0, **other)])
    assert len(blocks) == 2
    assert {"1024" in block.title for block in blocks} == {True, False}
    assert all(
        value(block, "speedup", "1", "emulated", "serial", "-") == pytest.approx(1)
        for block in blocks
    )


def test_devices_with_another_profile_have_a_table_of_their_own() -> None:
    alike = {"parallel.search.profiles.core": "profiles/pipeline_depth/alike.json"}
    rows = [emulated(8, 1000.0, "gpipe", bubble_share=0.2), emulated(1, 200.0),
            emulated(8, 1300.0, "gpipe", bubble_share=0.18, **alike)]  # fmt: skip
    usual, other = PIPELINE_DEPTH.blocks(rows)
    row = ("8", "emulated", "GPipe", "ours")
    assert (value(usual, "bubble", *row), value(other, "bubble", *row)) == (20.0, 18.0)
    assert "alike.json" in other.title
    command = cell(other, "speedup", "4", "emulated", "GPipe", "ours").command
    assert "'parallel.search.profiles={core:profiles/pipeline_depth/alike.json}'" in command
    assert {labels[1] for labels in usual.rows} == {"measured", "emulated"}
    assert {labels[1] for labels in other.rows} == {"emulated"}, "it is no profile of a real core"


def test_a_measured_run_is_beside_the_others_whatever_its_plan_was_made_by() -> None:
    profiled = {"parallel.search.profiles.core": "mine.json"}
    block = only(
        trained(1, train_shapes_per_s=100.0),
        trained(2, "gpipe", train_shapes_per_s=150.0, **profiled),
    )
    assert value(block, "speedup", "2", "measured", "GPipe", "ours") == pytest.approx(1.5)


def test_the_csv_has_the_kind_of_a_row_and_that_of_its_runs() -> None:
    found = csv_rows(fill(PIPELINE_DEPTH, [emulated(1, 200.0)], None))
    serial = [row for row in found if (row["stages"], row["quantity"]) == ("1", "time")]
    assert [(row["obtained"], row["kind"]) for row in serial] == [
        ("measured", ""), ("emulated", "emulated"),
    ]  # fmt: skip


def test_missing_cells_name_the_run_that_they_lack() -> None:
    block = only(trained(2, "gpipe", train_shapes_per_s=120.0))
    found = cell(block, "speedup", "2", "measured", "GPipe", "ours")
    assert found.missing
    assert found.command.endswith("paper/schedule=serial paper/depth=measured_2"), "what it is over"
    lacking = cell(block, "time", "8", "emulated", "1F1B", "variance")
    assert lacking.command == (
        "sparsepipe experiment=pipeline_depth paper/schedule=sync_1f1b paper/depth=emulated_8 "
        "paper.partition=variance"
    )
