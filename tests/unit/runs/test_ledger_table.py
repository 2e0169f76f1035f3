"""Tables of unlike runs: text, Parquet and memory hold the same, and the document names it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from sparsepipe.runs.ledger import gather, load_results
from sparsepipe.runs.ledger_table import (
    ALWAYS,
    OF_TASKS,
    LedgerColumn,
    cell_text,
    cell_value,
    frame_of,
    rows_of,
)
from sparsepipe.utils.files import read_json, write_json

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", " ", "null", "true", "NaN", "Infinity", "-1", "1e5", "12e456789012", "1e999", "[1]", '"x"',
     "007", "a,b", 'a"b', "a\rb", "a\nb", "\x00", "\ufeffname", "auto", "2.13.0", "[" * 3000]
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXTS, st.integers(), max_size=2)
OWN_KEYS = ["a", "trainer.max_steps", "task.parallel.devices", "val/x", "", "1", "true", "größe,x"]
KEYS = st.sampled_from(
    [*OWN_KEYS, *(c.name for c in (*ALWAYS, *OF_TASKS) if c.name not in ("name", "run_id"))]
)
# Few keys, so that runs have some in common, with values of one type and of several.
RESULTS = st.lists(st.dictionaries(KEYS, VALUES, max_size=6), min_size=1, max_size=5)


@settings(deadline=None)
@example([math.inf])
@example([math.nan, 1])
@given(VALUES.filter(lambda value: not (isinstance(value, float) and not math.isfinite(value))))
def test_a_cell_says_by_itself_what_it_is(value: Any) -> None:
    again = cell_value(cell_text(value))
    assert again == value or json.dumps(again) == json.dumps(value)  # NaN within a list
    assert type(again) is type(value)


@settings(deadline=None)
@given(TEXTS)
def test_a_cell_is_one_line(text: str) -> None:
    assert len(cell_text(text).splitlines()) <= 1


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(RESULTS)
def test_runs_parquet_and_csv_are_one_table(
    tmp_path_factory, results: list[dict[str, Any]]
) -> None:
    root = tmp_path_factory.mktemp("ledger") / "study"
    for number, result in enumerate(results):
        directory = root / f"run{number}"
        directory.mkdir(parents=True)
        write_json(directory / "result.json", result)  # as runs do: without NaN and infinities
        (directory / "DONE.json").write_text("{}")
    written = gather(root)
    for source in (root, root / "ledger.parquet", root / "ledger.csv"):
        assert_frame_equal(load_results(source), written, check_exact=True)
    assert_frame_equal(pd.read_parquet(root / "ledger.parquet"), written, check_exact=True)
    assert list(written["run_id"]) == [f"run{number}" for number in range(len(results))]
    for number in range(len(results)):
        for key, value in read_json(root / f"run{number}" / "result.json").items():
            _assert_is(written[key][number], value)


def _assert_is(cell: Any, value: Any) -> None:
    """A cell of the table holds what a result holds, numbers as numbers or as text."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        assert pd.isna(cell)
    elif isinstance(cell, str) and not isinstance(value, str):
        assert json.dumps(json.loads(cell)) == json.dumps(value)
    elif isinstance(value, bool) or isinstance(cell, (bool, np.bool_)):
        assert bool(cell) is value
    else:
        assert cell == value or cell == float(value)  # beyond 2**53 a column of numbers rounds


@settings(max_examples=20, deadline=None)
@given(RESULTS)
def test_order_of_runs_and_of_their_keys_does_not_matter(results: list[dict[str, Any]]) -> None:
    rows = [{"run_id": str(number), **row} for number, row in enumerate(results)]
    turned = [dict(reversed(row.items())) for row in reversed(rows)]
    there, back = frame_of(rows), frame_of(turned)
    assert_frame_equal(there, back[::-1].reset_index(drop=True), check_exact=True)


@settings(max_examples=20, deadline=None)
@given(RESULTS)
def test_types_of_known_columns_do_not_depend_on_runs(results: list[dict[str, Any]]) -> None:
    """As long as their values are of it; a column that nobody fills has its type as well."""
    frame = frame_of(results)
    for column in ALWAYS:
        values = [row.get(column.name) for row in results]
        if all(value is None for value in values):
            assert frame[column.name].dtype == column.dtype


@pytest.mark.parametrize(
    ("key", "values", "dtype", "cells"),
    [
        ("trainer.max_epochs", [1, None, 2**53 + 1], "Int64", [1, pd.NA, 2**53 + 1]),
        ("trainer.max_epochs", [1, 0.5], "float64", [1.0, 0.5]),
        ("epoch_time_s", [1, 2], "float64", [1.0, 2.0]),
        ("test/accuracy/chair", [1, None], "float64", [1.0, math.nan]),
        ("test/accuracy", [None], "float64", [math.nan]),
        ("epochs", [2, 2.5], "float64", [2.0, 2.5]),
        ("epochs", [2, "many"], "string", ["2", "many"]),
        ("task.test", [True, False, None], "boolean", [True, False, pd.NA]),
        ("task.test", [True, 1], "string", ["true", "1"]),
        ("parallel.devices", ["auto", 2], "string", ["auto", "2"]),
        ("data.augment.scale", [[0.75, 1.25], None], "string", ["[0.75, 1.25]", pd.NA]),
        ("task.profiles", [{}], "string", ["{}"]),
        ("trainer.max_time", [None], "string", [pd.NA]),
        ("seed", [10**30], "string", [str(10**30)]),
        ("data.scale", [math.nan, math.inf, 1.5], "float64", [math.nan, math.nan, 1.5]),
        ("git_commit", ["\ud800half"], "string", ["?half"]),
    ],
)
def test_types(key: str, values: list[Any], dtype: str, cells: list[Any]) -> None:
    column = frame_of([{key: value} for value in values])[key]
    assert column.dtype == dtype
    assert [repr(cell) for cell in column.tolist()] == [repr(cell) for cell in cells]


def test_order_of_columns() -> None:
    """What is known, in its order; then metrics and figures by name; then the configuration."""
    keys = ["zoo", "optim.lr", "dp_s", "numpy", "data.batch_size", "a.b", "test/accuracy/bed",
            "plan_cuts", "trainer", "run_id"]  # fmt: skip
    always = [column.name for column in ALWAYS]
    assert list(frame_of([dict.fromkeys(keys, 1)])) == [
        *always,
        *("plan_cuts", "dp_s"),
        *("a.b", "test/accuracy/bed", "trainer", "zoo"),
        *("data.batch_size", "optim.lr"),
    ]
    assert len({column.name for column in (*ALWAYS, *OF_TASKS)}) == len(ALWAYS) + len(OF_TASKS)


def test_a_table_without_rows_has_its_columns() -> None:
    frame = frame_of([])
    assert (len(frame), list(frame)) == (0, [column.name for column in ALWAYS])
    assert rows_of(frame) == []


def test_what_other_programs_see_of_the_text(tmp_path: Path) -> None:
    """Words, versions and numbers stand as they are; what looks like something else is quoted."""
    assert [cell_text(value) for value in ("dp", "2.13.0", 3, 0.1, True, None, [1, "x"])] == [
        "dp", "2.13.0", "3", "0.1", "true", "", '[1, "x"]'
    ]  # fmt: skip
    assert [cell_text(text) for text in ("12", "true", "", "[1]", "a\nb")] == [
        '"12"', '"true"', '""', '"[1]"', '"a\\nb"'
    ]  # fmt: skip


DOCUMENT = (Path(__file__).parents[3] / "docs" / "results.md").read_text()


def listed(heading: str) -> list[tuple[str, str]]:
    section = DOCUMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| ([^|]*?) ?\| [^|]+ \|$", section, re.MULTILINE)


@pytest.mark.parametrize(
    ("heading", "columns"),
    [("Columns of every ledger", ALWAYS), ("Columns of some tasks", OF_TASKS)],
)
def test_the_document_lists_the_columns(heading: str, columns: tuple[LedgerColumn, ...]) -> None:
    """All of them, in their order, with the unit of their numbers."""
    assert listed(heading) == [(column.name, column.unit) for column in columns]


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
    assert all(f"`{key}`" in DOCUMENT for key in told)


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
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL):
        exec(compile(block, "results.md", "exec"), {})
    assert re.search(r"32 +0\.5 +0\.75", capsys.readouterr().out)
    assert (tmp_path / "experiments" / "first" / "ledger.csv").exists()
