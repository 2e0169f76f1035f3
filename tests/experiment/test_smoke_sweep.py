"""The whole of Table II as small as can be: from one command to report, ledger and notebook.

``make smoke`` runs this. It takes minutes: every cell has processes of its own, and so has every
size of a batch that is tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from reported_cells import cells, there

from sparsepipe.results import load_results
from sparsepipe.results.report.exhibits import EXHIBITS

ROOT = Path(__file__).parents[2]
COMMAND = "sparsepipe -m experiment=table2 scale=smoke"
LIMIT_S = 3600
HEADS = ("grid", "devices", "network", "p")


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 300)
def test_the_smallest_table_2_has_all_that_the_paper_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SPARSEPIPE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    assert COMMAND in (ROOT / "README.md").read_text()
    _sweep(tmp_path)
    outputs = tmp_path / "outputs" / "table2"
    (report,) = outputs.glob("sweeps/*/report/table2.csv")
    _check_report(report)
    _check_ledger(outputs)
    _check_notebook(tmp_path)


def _sweep(place: Path) -> None:
    with (place / "log.txt").open("w+") as log:
        done = subprocess.run(
            [sys.executable, "-m", *COMMAND.split()],
            cwd=place, stdout=log, stderr=subprocess.STDOUT, check=False, timeout=LIMIT_S,
        )  # fmt: skip
        log.seek(0)
        assert done.returncode == 0, log.read()[-10_000:]


def _check_report(file: Path) -> None:
    """Each cell has a figure of ours, or words in its place."""
    (empty,) = EXHIBITS["table2"].blocks([])
    assert there(file, *HEADS) == {(*cell.row, cell.column.key) for cell in empty.cells}
    found = cells(file, *HEADS).items()
    accuracies = [float(cell["ours"]) for place, cell in found if "accuracy" in place[-1]]
    assert len(accuracies) == 32
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)
    assert file.with_name("report.html").exists()
    assert file.with_suffix(".png").exists()


def _check_ledger(outputs: Path) -> None:
    ledger = load_results(outputs / "ledger.csv")
    assert Counter(ledger["task_name"]) == {"train": 16, "fit_batch": 8}
    assert Counter(ledger["ranks"]) == {1: 16, 4: 8}
    assert set(ledger["scale"]) == {"smoke"}
    assert list(ledger["run_id"]) == list(load_results(outputs)["run_id"])


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
