"""Table II as small as can be: from one command to report, ledger and notebook.

The command is killed on its way and given again: a quarter of it, all points at 32 voxels, once
(``make smoke``), the whole of it at five moments (``make test-full``). It takes minutes: every cell
has processes of its own, also where it is finished and skipped, and so has every size of a batch
that is tried.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from pandas.testing import assert_frame_equal

from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.runs.ledger import load_results
from sparsepipe.sweep.record import records_of
from tests.support.killed_sweep import Marks, Sweep, assert_none_twice, finish, kill_at, moments
from tests.support.reported_cells import cells, there
from tests.support.same_ledgers import assert_as_recorded, is_of_the_moment

ROOT = Path(__file__).parents[2]
COMMAND = "sparsepipe -m experiment=table2 scale=smoke"
RECORDED = ROOT / "experiments" / "table2_smoke" / "ledger.csv"
"""What the command leaves undisturbed; record it anew where the settings of such runs change."""
SEED = 2026
LIMIT_S = 3600
HEADS = ("grid", "devices", "network", "p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of the table is swept, and how many of its jobs are of each kind, in this order."""

    overrides: str
    grids: tuple[int, ...]
    point_ratios: tuple[float, ...]
    trainings: int
    searches: int

    @property
    def runs(self) -> int:
        return self.trainings + self.searches


WHOLE = Part(overrides="", grids=(32, 50), point_ratios=(1.0, 0.5, 0.25), trainings=16, searches=8)
QUARTER = Part(
    overrides=" data.resolution=32 paper/network=dense,sparse",
    grids=(32,),
    point_ratios=(1.0,),
    trainings=4,
    searches=2,
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Part], Sweep]:
    for name in [name for name in os.environ if name.startswith("SPARSEPIPE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    outputs = tmp_path / "outputs" / "table2"
    return lambda part: Sweep(command=COMMAND + part.overrides, place=tmp_path, outputs=outputs)


@pytest.mark.smoke
@pytest.mark.timeout(LIMIT_S)
def test_a_quarter_of_the_smallest_table_2_is_whole_though_it_was_killed(
    start: Callable[[Part], Sweep],
) -> None:
    """In the middle of a training."""
    sweep = start(QUARTER)
    (moment,) = moments(random.Random(SEED), kills=1, runs=QUARTER.trainings)
    _check(sweep, QUARTER, [kill_at(sweep, moment)])


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_smallest_table_2_is_whole_though_it_was_killed_five_times(
    start: Callable[[Part], Sweep],
) -> None:
    assert COMMAND in (ROOT / "docs" / "first_experiment.md").read_text()
    sweep = start(WHOLE)
    kills = moments(random.Random(SEED), kills=5, runs=WHOLE.runs)
    _check(sweep, WHOLE, [kill_at(sweep, moment) for moment in kills])
    _check_notebook(sweep.place)


def _check(sweep: Sweep, part: Part, killed: list[Marks]) -> None:
    finish(sweep, limit_s=LIMIT_S)
    assert len(sweep.runs()) == len(sweep.marks()) == part.runs
    assert_none_twice(sweep, killed)
    _check_report(_ended(sweep) / "report" / "table2.csv", part)
    ledger = _ledger(sweep, part)
    recorded = load_results(RECORDED)
    swept = recorded["data.resolution"].isin(part.grids)
    swept &= recorded["data.point_ratio"].isin(part.point_ratios)
    assert_as_recorded(ledger, recorded[swept])
    _check_interrupted(sweep, ledger)


def _ended(sweep: Sweep) -> Path:
    """The directory of the last one, which came to its end."""
    return max(sweep.outputs.glob("sweeps/*"))


def _check_report(file: Path, part: Part) -> None:
    """Each cell of what was swept has a figure of ours, or words in its place."""
    (empty,) = CHAPTERS["table2"].blocks([])
    grids = {f"{grid}³" for grid in part.grids}
    ratios = {f"{ratio:g}" for ratio in part.point_ratios}
    expected = {
        (*cell.row, cell.column.key)
        for cell in empty.cells
        if cell.row[0] in grids and cell.row[-1] in ratios
    }
    assert there(file, *HEADS) == expected
    found = cells(file, *HEADS)
    accuracies = [float(found[place]["ours"]) for place in expected if "accuracy" in place[-1]]
    assert len(accuracies) == 2 * part.trainings
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)
    assert file.with_name("report.html").exists()
    assert file.with_suffix(".png").exists()


def _ledger(sweep: Sweep, part: Part) -> pd.DataFrame:
    ledger = load_results(sweep.outputs / "ledger.csv")
    assert Counter(ledger["task_name"]) == {
        "train": part.trainings,
        "fit_batch": part.searches,
    }
    assert Counter(ledger["ranks"]) == {1: part.runs * 2 // 3, 4: part.runs // 3}
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
        command=f"sparsepipe -m {' '.join(record.overrides)} paths.outputs=undisturbed",
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
