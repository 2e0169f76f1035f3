"""The whole of Table II as small as can be: from one command to report, ledger and notebook.

The command is killed at five moments on its way, and given again each time. ``make smoke`` runs
this. It takes minutes: every cell has processes of its own, also where it is finished and skipped,
and so has every size of a batch that is tried.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from pandas.testing import assert_frame_equal

from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.runs.ledger import load_results
from sparsepipe.sweep.record import records_of
from tests.support.killed_sweep import Sweep, assert_none_twice, finish, kill_at, moments
from tests.support.reported_cells import cells, there
from tests.support.same_ledgers import assert_as_recorded, is_of_the_moment

ROOT = Path(__file__).parents[2]
COMMAND = "sparsepipe -m experiment=table2 scale=smoke"
RECORDED = ROOT / "experiments" / "table2_smoke" / "ledger.csv"
"""What the command leaves undisturbed; record it anew where the settings of such runs change."""
RUNS, KILLS = 24, 5
SEED = 2026
LIMIT_S = 3600
HEADS = ("grid", "devices", "network", "p")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    for name in [name for name in os.environ if name.startswith("SPARSEPIPE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return Sweep(command=COMMAND, place=tmp_path, outputs=tmp_path / "outputs" / "table2")


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_smallest_table_2_is_whole_though_it_was_killed_five_times(sweep: Sweep) -> None:
    assert COMMAND in (ROOT / "README.md").read_text()
    asked = moments(random.Random(SEED), kills=KILLS, runs=RUNS)
    done = [kill_at(sweep, moment) for moment in asked]
    finish(sweep, limit_s=LIMIT_S)
    assert len(sweep.runs()) == len(sweep.marks()) == RUNS
    assert_none_twice(sweep, done)
    _check_report(_ended(sweep) / "report" / "table2.csv")
    ledger = _ledger(sweep)
    assert_as_recorded(ledger, load_results(RECORDED))
    _check_interrupted(sweep, ledger)
    _check_notebook(sweep.place)


def _ended(sweep: Sweep) -> Path:
    """The directory of the last one, which came to its end."""
    return max(sweep.outputs.glob("sweeps/*"))


def _check_report(file: Path) -> None:
    """Each cell has a figure of ours, or words in its place."""
    (empty,) = CHAPTERS["table2"].blocks([])
    assert there(file, *HEADS) == {(*cell.row, cell.column.key) for cell in empty.cells}
    found = cells(file, *HEADS).items()
    accuracies = [float(cell["ours"]) for place, cell in found if "accuracy" in place[-1]]
    assert len(accuracies) == 32
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)
    assert file.with_name("report.html").exists()
    assert file.with_suffix(".png").exists()


def _ledger(sweep: Sweep) -> pd.DataFrame:
    ledger = load_results(sweep.outputs / "ledger.csv")
    assert Counter(ledger["task_name"]) == {"train": 16, "fit_batch": 8}
    assert Counter(ledger["ranks"]) == {1: 16, 4: 8}
    assert set(ledger["scale"]) == {"smoke"}
    assert list(ledger["run_id"]) == list(load_results(sweep.outputs)["run_id"])
    assert dict(zip(ledger["run_id"], ledger["starts"], strict=True)) == sweep.starts()
    return ledger


def _check_interrupted(sweep: Sweep, ledger: pd.DataFrame) -> None:
    """Some runs were gone on with; a training of these is as one that nothing has disturbed."""
    assert (ledger["starts"] > 1).any()
    trained = ledger[(ledger["starts"] > 1) & (ledger["task_name"] == "train")]
    run = str(trained["run_id"].iloc[0])
    (record,) = [one for one in records_of(_ended(sweep)) if Path(str(one.run)).name == run]
    undisturbed = Sweep(
        command=f"sparsepipe -m {record.text} paths.outputs=undisturbed",
        place=sweep.place,
        outputs=sweep.place / "undisturbed" / "table2",
    )
    finish(undisturbed, limit_s=LIMIT_S / 6)
    theirs = load_results(undisturbed.outputs / "ledger.csv")
    assert list(theirs["run_id"]) == [run]
    same = [name for name in theirs.columns if not is_of_the_moment(name)]
    ours = ledger[ledger["run_id"] == run].reset_index(drop=True)
    assert_frame_equal(ours[same], theirs[same], check_exact=True, check_dtype=False)


def _check_notebook(place: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "table2.ipynb", as_version=4)
    where = {"metadata": {"path": str(place)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    texts = "\n".join(
        output.get("data", {}).get("text/markdown", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert "Nothing is missing." in texts
