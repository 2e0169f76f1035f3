"""Largest batches of Table II: what a search has told, and what it has left open."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.trainings import TABLE2
from sparsepipe.report.chapter import Cell, Ours
from sparsepipe.runs.ledger_table import Row
from tests.support.report_cases import fitting, value

D1 = ("32³", "1", "dense", "1")
S1 = ("32³", "1", "sparse", "1")
UNLIMITED = {"refused_batch": None, "limited_by": "most"}
"""As result.json has it of a search that ended at task.most."""


def cell(column: str, row: tuple[str, ...], *rows: Row) -> Cell:
    (block,) = TABLE2.blocks(rows)
    (found,) = [c for c in block.cells if c.row == row and c.column.key == column]
    return found


def ours(column: str, row: tuple[str, ...], *rows: Row) -> Ours:
    found = cell(column, row, *rows).ours
    assert found is not None
    return found


def lacking(row: dict[str, Any]) -> dict[str, Any]:
    """As the ledger hands it on: what is null is not there."""
    return {key: value for key, value in row.items() if value is not None}


@pytest.mark.parametrize(
    ("limited_by", "why"),
    [("most", "task.most allows no larger one"), ("data", "the data have no more shapes")],
)
def test_what_memory_has_not_ended_is_a_bound(limited_by: str, why: str) -> None:
    dense = fitting("dense", 32, batch=60)
    sparse = lacking(fitting("sparse", 32, batch=150, refused_batch=None, limited_by=limited_by))
    batch = ours("batch", S1, dense, sparse)
    assert (batch.value, batch.counts) == ("≥ 150", False)
    assert why in batch.note
    ratio = cell("batch_ratio", S1, dense, sparse)
    assert ratio.ours is not None
    assert ratio.ours.value == "≥ 2.50"
    assert why in ratio.ours.note
    assert ratio.compared is None, "it is not set against the paper's ratio of two that fit"
    assert not ratio.missing


def test_a_baseline_that_memory_has_not_ended_makes_the_ratio_a_bound_from_above() -> None:
    dense, sparse = fitting("dense", 32, batch=60, **UNLIMITED), fitting("sparse", 32, batch=150)
    ratio = ours("batch_ratio", S1, dense, sparse)
    assert (ratio.value, ratio.counts) == ("≤ 2.50", False)
    both = ours("batch_ratio", S1, dense, fitting("sparse", 32, batch=64, **UNLIMITED))
    assert (both.value, both.counts) == ("no ratio", False)
    assert both.note.startswith("no ratio: the search did not end for lack of memory")


def test_a_search_that_ended_early_has_bounds() -> None:
    """60 to 65 over 20 to 23: the largest of one over the largest of the other."""
    dense = fitting("dense", 32, batch=20, refused_batch=24)
    sparse = fitting("sparse", 32, batch=60, refused_batch=66)
    batch = ours("batch", S1, dense, sparse)
    assert (batch.value, batch.counts) == (60, True)
    assert batch.note == ("the largest batch lies between 60 and 65: sizes between were not tried")
    ratio = cell("batch_ratio", S1, dense, sparse)
    assert ratio.ours is not None
    assert ratio.ours.value == pytest.approx(3)
    assert ratio.ours.note.startswith(f"the ratio lies between {60 / 23:.2f} and {65 / 20:.2f}")
    assert ratio.compared == pytest.approx(3 / 2)
    least = ours("batch_ratio", S1, dense, fitting("sparse", 32, batch=60, **UNLIMITED))
    assert least.value == "≥ 2.61"  # 60 / 23
    rows = fitting("dense", 32, batch=60), fitting("dense", 32, batch=80, seed=1, **UNLIMITED)
    assert ours("batch", D1, *rows).value == "≥ 70", "memory did not end one of several"


def test_searches_with_one_seed_are_taken_together() -> None:
    """One was ended at 64, one early between 40 and 90, one knew: 60 to 79."""
    known = fitting("dense", 32, batch=60, refused_batch=80)
    ended = fitting("dense", 32, batch=64, run_id="a", **{**UNLIMITED, "task.most": 64})
    early = {"batch": 40, "refused_batch": 90, "task.most": 4096, "run_id": "b"}
    batch = ours("batch", D1, lacking(ended), fitting("dense", 32, **early))
    assert (batch.value, batch.spread, batch.count, batch.counts) == (64, None, 1, True)
    assert batch.note.startswith("the largest batch lies between 64 and 89")
    assert len(batch.runs) == 2
    both = ours("batch", D1, lacking(ended), known, fitting("dense", 32, **early))
    assert both.note.startswith("the largest batch lies between 64 and 79")
    exact = ours("batch", D1, lacking(ended), fitting("dense", 32, batch=300))
    assert (exact.value, exact.note, exact.counts) == (300, "", True)
    (block,) = TABLE2.blocks([lacking(ended), fitting("dense", 32, **early)])
    assert (
        "largest batch, 32³, 1, dense, 1: runs a, b all have seed 0 and "
        "differ in task.most: sizes that any has tried count"
    ) in block.notes


def test_other_seeds_are_averaged_with_what_those_of_one_have_found() -> None:
    rows = (
        fitting("dense", 32, batch=60),
        fitting("dense", 32, batch=50, refused_batch=80),
        fitting("dense", 32, batch=70, seed=1),
    )
    batch = ours("batch", D1, *rows)
    assert (batch.value, batch.spread, batch.count) == (65, (60, 70), 2)


def test_trials_of_unlike_lengths_are_apart() -> None:
    """The first step has no state of the optimizer beside its activations."""
    one = fitting("dense", 32, batch=300, **{"task.steps": 1})
    two = fitting("dense", 32, batch=200, **{"task.steps": 2, "task.budget_bytes": 1e9})
    wide = fitting("dense", 32, batch=200, **{"task.steps": 2, "task.budget_bytes": 2e9})
    first, second = TABLE2.blocks([one, {**two, "task.budget_bytes": None}])
    assert [value(block, "batch", *D1) for block in (first, second)] == [300, 200]
    assert "batches tried by 1 step;" in first.title
    assert "batches tried by 2 steps;" in second.title
    assert all("MB; " not in block.title for block in (first, second)), "both have one budget"
    titles = [block.title for block in TABLE2.blocks([one, two, wide])]
    assert len(set(titles)) == len(titles) == 3


def test_rows_on_several_devices_say_that_the_search_was_on_one() -> None:
    four = ("32³", "4", "sparse", "1")
    rows = fitting("dense", 32, batch=60), fitting("sparse", 32, batch=150, refused_batch=160)
    for column in ("batch", "batch_ratio"):
        alone, several = ours(column, S1, *rows), ours(column, four, *rows)
        assert several.value == alone.value
        assert "one device" not in alone.note
        assert several.note.startswith(f"{alone.note}; searched for on one device")
    exact = ours("batch", four, fitting("sparse", 32, batch=150))
    assert exact.note.startswith("searched for on one device: each of several holds")
    assert cell("batch", four).missing


def test_no_batch_at_all_has_no_ratio() -> None:
    none = fitting("dense", 32, batch=0, refused_batch=1)
    ratio = ours("batch_ratio", S1, none, fitting("sparse", 32, batch=60))
    assert (ratio.value, ratio.counts) == ("no ratio", False)
    assert ours("batch", D1, none).value == 0


def test_a_budget_is_noted_where_there_is_one() -> None:
    row = fitting("dense", 32, batch=200)
    (block,) = TABLE2.blocks([row])
    assert "A batch fits where a training step takes at most 2,750 MB." in block.notes
    filled = lacking({**row, "budget_bytes": None, "limited_by": "out_of_memory"})
    (of_gpu,) = TABLE2.blocks([filled])
    assert not [note for note in of_gpu.notes if note.startswith("A batch fits")]
    assert ours("batch", D1, filled).value == 200
