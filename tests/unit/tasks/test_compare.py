"""Runs beside each other: settings, figures and curves, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsepipe.errors import ConfigError, DataError
from sparsepipe.runs.rundir import RunDir
from sparsepipe.tasks.compare import ComparedRun, compare, curve_names

METRICS = "epoch,step,train/loss,val/accuracy,time/epoch_s\n0,4,2.0,0.25,1.0\n1,8,1.0,0.5,1.0\n"


def made(path: Path, *, lr: float, done: bool = True, **figures: Any) -> Path:
    path.mkdir(parents=True)
    optim = {"optimizer": {"lr": lr, "momentum": 0.9}}
    values = {"name": path.parent.name, "seed": 0, "optim": optim, "paths": {"outputs": str(lr)}}
    (path / "config.yaml").write_text(yaml.safe_dump(values))
    (path / "metrics.csv").write_text(METRICS)
    if done:
        result = {"run_id": path.name, "seed": 0, "optim.optimizer.lr": lr, **figures}
        (path / "result.json").write_text(json.dumps(result))
        (path / "DONE.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("compared") / "outputs"
    figures = {"val/accuracy": 0.5, "steps": 8000, "test/accuracy/mug": 1.0, "plan_cuts": [3]}
    figures |= {"test/accuracy": 0.25, "ranks": 1, "machine_cores": 2, "time/epoch_s": 1.0}
    made(place / "first" / "aaa", lr=0.1, **figures, torch="2.11.0")
    other = {"val/accuracy": 0.75, "ranks": 2, "machine_cores": 2, "torch": "2.13.0"}
    made(place / "first" / "bbb", lr=0.2, **other)
    made(place / "second" / "ccc", lr=0.1, done=False)
    made(place / "second" / "aaa", lr=0.1)
    return place


def compared(outputs: Path, *runs: Any, **more: Any) -> str:
    return compare([], width=80, runs=list(runs), where=str(outputs), **more)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    return [re.sub(r" +", " ", line).strip("| ").split(" | ") for line in lines]


def test_settings_figures_and_curves(outputs: Path) -> None:
    text = compared(outputs, str(outputs / "first" / "aaa"), "bbb")
    assert rows(text) == [
        ["aaa", "bbb"],
        ["optim.optimizer.lr", "0.1", "0.2"],
        ["aaa", "bbb"],
        ["ranks", "1", "2"],
        ["torch", "2.11.0", "2.13.0"],
        ["aaa", "bbb"],
        ["steps", "8,000", "-"],
        ["val/accuracy (0 to 1)", "0.5", "0.75"],
        ["test/accuracy (0 to 1)", "0.25", "-"],
    ]
    made = outputs / "compare" / "aaa-bbb"
    assert f"Curves: {made / 'curves.png'}" in text
    assert (made / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (made / "compare.md").read_text() == text + "\n"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            [{"name": "x", "seed": 0, "a.lr": 0.1, "b": 1}, {"name": "y", "seed": 1, "a.lr": 0.2}],
            ["one: lr=0.1, b=1", "two: lr=0.2, b=-"],
        ),
        (
            [
                {"seed": 0, "objective": "val/loss", "data.root": "a", "data.val_share": 0.2},
                {"seed": 1, "objective": None, "data.root": "a", "data.val_share": 0.1},
            ],
            ["one: val_share=0.2, seed=0", "two: val_share=0.1, seed=1"],
        ),
        ([{"objective": "x"}, {"objective": None}], ["one: objective=x", "two: objective=null"]),
        ([{"name": "x", "seed": 0}, {"name": "y", "seed": 0}], ["one", "two"]),
    ],
)
def test_curves_are_called_by_what_differs(settings: list[Any], names: list[str]) -> None:
    runs = [
        ComparedRun(label=label, directory=RunDir(Path(label)), settings=each, result={})
        for label, each in zip(("one", "two"), settings, strict=True)
    ]
    assert curve_names(runs) == names


def test_an_unfinished_run_is_called_so(outputs: Path, tmp_path: Path) -> None:
    text = compared(outputs, outputs / "first" / "aaa", "ccc", to=str(tmp_path / "there"))
    assert text.startswith("second/ccc is unfinished (2 epochs so far)")
    assert ["name", "first", "second"] in rows(text)
    assert ["steps", "8,000", "-"] in rows(text)
    assert "What else differs" not in text, "from nothing"
    assert (tmp_path / "there" / "curves.png").is_file()


def test_a_run_that_trained_nothing_is_called_so(outputs: Path, tmp_path: Path) -> None:
    path = made(tmp_path / "x" / "ddd", lr=0.1, task_name="predict")
    (path / "metrics.csv").unlink()
    text = compared(outputs, "bbb", path, to=str(tmp_path / "there"))
    assert text.endswith("/curves.png; without x/ddd (predict), which trained no epoch")


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "runs names 0"),
        (["bbb", "bbb"], "named twice"),
        (["bbb", "aaa"], "2 runs have the id aaa"),
        (["bbb", "bbc"], "bbc is neither the directory nor the id of a run"),
    ],
)
def test_refused(outputs: Path, runs: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compared(outputs, *runs)
    assert message in str(refused.value)


def test_a_configuration_that_cannot_be_read_is_named(outputs: Path, tmp_path: Path) -> None:
    path = made(tmp_path / "x" / "broken", lr=0.1)
    (path / "config.yaml").write_text("a: [")
    with pytest.raises(
        DataError, match=r"broken/config.yaml is not a valid configuration: .*line 1"
    ):
        compared(outputs, "bbb", path)
