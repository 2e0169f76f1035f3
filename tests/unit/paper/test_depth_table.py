"""The study of depth from ledgers made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.pipeline_depth import PIPELINE_DEPTH
from sparsepipe.paper.printed import printed
from sparsepipe.report.chapter import Block
from sparsepipe.runs.ledger_table import Row
from tests.support.report_cases import cell, run, value


def trained(
    depth: int, schedule: str = "asynchronous", partition: str | None = "straight", **more: Any
) -> Row:
    """As task=train leaves it; emulated where the kind says so."""
    parts = {} if schedule == "asynchronous" else {"parallel.strategy.microbatches": 32}
    if depth == 1:
        schedule, partition, parts = "serial", None, {}
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
            "study.cell.depth": depth,
            "study.cell.emulated": is_emulated,
            "study.cell.schedule": schedule,
            "study.cell.partition": partition,
            **parts,
            **more,
        },
    )


def emulated(depth: int, rate: float, *of_cell: str, **more: Any) -> Row:
    return trained(depth, *of_cell, kind="emulated", samples_per_s=rate, **more)


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


def test_speedups_are_over_the_serial_run_of_their_kind() -> None:
    block = only(
        trained(1, train_shapes_per_s=100.0),
        trained(2, "gpipe", "variance", train_shapes_per_s=175.0, bubble_share=0.04),
        emulated(1, 200.0, kept_bytes=400e6),
        emulated(8, 1200.0, "sync_1f1b", kept_bytes=60e6, bubble_share=0.2),
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


def test_devices_with_another_profile_have_a_table_of_their_own() -> None:
    alike = {"parallel.search.profiles.core": "profiles/pipeline_depth/alike.json"}
    rows = [emulated(8, 1000.0, "gpipe", bubble_share=0.2), emulated(1, 200.0),
            emulated(8, 1300.0, "gpipe", bubble_share=0.18, **alike)]  # fmt: skip
    usual, other = PIPELINE_DEPTH.blocks(rows)
    row = ("8", "emulated", "GPipe", "ours")
    assert (value(usual, "bubble", *row), value(other, "bubble", *row)) == (20.0, 18.0)
    assert "alike.json" in other.title
    assert {labels[1] for labels in usual.rows} == {"measured", "emulated"}
    assert {labels[1] for labels in other.rows} == {"emulated"}, "it is no profile of a real core"


def test_serial_runs_are_in_the_tables_of_all_microbatches() -> None:
    eight = {"parallel.strategy.microbatches": 8}
    rows = [emulated(1, 200.0), emulated(4, 700.0, "gpipe"), emulated(4, 600.0, "gpipe", **eight)]
    usual, other = sorted(PIPELINE_DEPTH.blocks(rows), key=lambda block: "T = 8" in block.title)
    row = ("4", "emulated", "GPipe", "ours")
    assert value(usual, "speedup", *row) == pytest.approx(3.5)
    assert value(other, "speedup", *row) == pytest.approx(3.0)
    assert value(other, "ideal", *row) == pytest.approx(300 / 11)


def test_a_note_names_how_rates_were_taken() -> None:
    short = {"hydra.overrides": ["experiment=pipeline_depth", "trainer.limit_train_batches=8"]}
    block = only(emulated(1, 100.0), emulated(1, 300.0, seed=1, **short))
    assert block.notes == ("Some runs were made with trainer.limit_train_batches=8.",)
