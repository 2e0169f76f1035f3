"""The document on results says of every known column what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.ledger_table import ALWAYS, OF_TASKS, LedgerColumn
from sparsepipe.utils.files import write_json

TEXT = (Path(__file__).parents[3] / "docs" / "results.md").read_text()


def rows(heading: str) -> list[tuple[str, str]]:
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| ([^|]*?) ?\| [^|]+ \|$", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "columns"),
    [("Columns of every ledger", ALWAYS), ("Columns of some tasks", OF_TASKS)],
)
def test_the_document_lists_the_columns(heading: str, columns: tuple[LedgerColumn, ...]) -> None:
    """All of them, in their order, with the unit of their numbers."""
    assert rows(heading) == [(column.name, column.unit) for column in columns]


def test_keys_that_only_reports_have_are_no_columns(tmp_path: Path) -> None:
    """They are in no ledger; the document names their keys where it says so."""
    told = {"exhibits": ["table2"], "figures": 2, "figures_missing": 94}
    for task in ("train", "report"):
        own = told if task == "report" else {}
        write_json(tmp_path / task / "result.json", {"task_name": task, **own})
        write_json(tmp_path / task / "DONE.json", {})
    frame = load_results(tmp_path)
    assert list(frame["task_name"]) == ["train"]
    assert not set(told) & {*frame.columns, *(column.name for column in (*ALWAYS, *OF_TASKS))}
    assert all(f"`{key}`" in TEXT for key in told)


def test_units_stand_in_names() -> None:
    endings = {"_s": "s", "_bytes": "bytes", "_bytes_per_s": "bytes/s", "_per_s": "1/s"}
    for column in (*ALWAYS, *OF_TASKS):
        ending = next((e for e in ("_bytes_per_s", "_per_s", "_bytes", "_s")
                       if column.name.endswith(e)), None)  # fmt: skip
        if ending is not None:
            assert column.unit == endings[ending], column.name


def test_code_of_the_document_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"data.resolution": 32, "data.point_ratio": 0.5, "test/accuracy": 0.75}
    told["val/accuracy"] = 0.5
    for number, task in enumerate(("train", "evaluate")):
        run = tmp_path / "outputs" / "first" / str(number)
        write_json(run / "result.json", {"kind": "measured", "task_name": task, **told})
        write_json(run / "DONE.json", {})
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "results.md", "exec"), {})
    assert re.search(r"32 +0\.5 +0\.75", capsys.readouterr().out)
    assert (tmp_path / "experiments" / "first" / "ledger.csv").exists()
