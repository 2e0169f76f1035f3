"""The ledgers that this repository has recorded, as one tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.report.measurements import plain_rows
from sparsepipe.runs.ledger import load_results, read_tree
from sparsepipe.runs.ledger_table import rows_of

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
LEDGERS = sorted(EXPERIMENTS.glob("*/ledger.csv"))


def test_no_recorded_run_is_left_out() -> None:
    tree = read_tree(EXPERIMENTS)
    assert (tree.unfinished, tree.broken) == ([], [])
    assert EXPERIMENTS / "modelnet40_points" in tree.rows
    every = set(load_results(EXPERIMENTS)["run_id"])
    assert every > {run_id for ledger in LEDGERS for run_id in load_results(ledger)["run_id"]}


@pytest.mark.parametrize("data", ["generated shapes", "ModelNet40 as point clouds"])
def test_runs_come_into_the_chapter_of_their_experiment(data: str) -> None:
    """Also those in a directory of another name than theirs, each setting in a table of its own."""
    rows = plain_rows(rows_of(load_results(EXPERIMENTS, experiment="table2")))
    blocks = CHAPTERS["table2"].blocks(rows)
    (desk, *_) = [block for block in blocks if block.title.startswith(f"scale desk; {data}")]
    assert sum(cell.ours is not None for cell in desk.cells) > 12
