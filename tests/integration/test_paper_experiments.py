"""The paper's tables and figures through the command line, on a few shapes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell
from tests.support.paths import run_python
from tests.support.reported_cells import cells, there

FEW = ("scale=smoke", "data.source.train_per_class=1", "data.source.test_per_class=1")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "desk_steps.py"


@pytest.mark.full
def test_the_largest_batch_of_a_cell_of_table_2(shell: Shell) -> None:
    done = shell("experiment=table2", *FEW, "paper/trial=largest_batch", "task.start=16")
    result = read_json(done.run / "result.json")
    assert (result["largest_batch"], result["limited_by"]) == (16, "most")
    assert 0 < result["step_memory_bytes"] <= result["budget_bytes"] == 300e6
    made = shell("task=report", "experiment=table2").run / "table2.csv"
    heads = ("grid", "devices", "network", "p")
    places = {("32³", devices, "sparse", "1", "batch") for devices in ("1", "4")}
    assert there(made, *heads) == places
    assert {cells(made, *heads)[place]["ours"] for place in places} == {"≥ 16"}


@pytest.mark.full
def test_dense_networks_of_figure_8_until_they_do_not_fit(shell: Shell) -> None:
    # Twice 16 MB for each of 4 shapes at 100^3, many times over: no step of it fits into 300 MB.
    asked = ("paper/network=dense", "data.resolution=32,100")
    swept = shell.sweep("experiment=fig8", *FEW, "task.timed_batches=2", *asked)
    assert swept.code == 0, swept.err
    results = [read_json(path) for path in shell.cwd.glob("outputs/fig8/*/result.json")]
    coarse, fine = sorted(results, key=lambda result: result["data.resolution"])
    assert (coarse["fits"], fine["fits"]) == (True, False)
    assert coarse["step_memory_bytes"] <= coarse["budget_bytes"] == 300e6
    assert coarse["inference_shapes_per_s"] > 0
    assert {"train/accuracy", "test/accuracy"} <= set(coarse)
    assert (fine["limited_by"], fine["step_memory_bytes"]) == ("over_budget", None)
    assert all((shell.cwd / "outputs/fig8" / r["run_id"] / "DONE.json").exists() for r in results)
    (file,) = shell.cwd.glob("outputs/fig8/sweeps/*/report/fig8.csv")
    quantities = ("train_accuracy", "test_accuracy", "inference_rate", "memory")
    assert there(file, "grid", "network") == {
        (grid, "dense", name) for grid in ("32³", "100³") for name in quantities
    }
    told = cells(file, "grid", "network")
    assert told["100³", "dense", "test_accuracy"]["ours"] == "does not fit"
    assert told["100³", "dense", "memory"]["ours"] == "over 300"


@pytest.mark.full
def test_the_benchmark_estimates_what_sweeps_take(tmp_path: Path) -> None:
    done = run_python(tmp_path, str(BENCHMARK), "--scale", "smoke", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "table2: 16 trainings, " in done.stdout
    assert "fig8: 6 trainings, " in done.stdout


NARROW = ("paper/trial=one_device", "paper/network=sparse_p025", "data.resolution=32")
HEADS = ("grid", "devices", "network", "p")
SPARSE, DENSE = ("32³", "1", "sparse", "0.25"), ("32³", "1", "dense", "1")
TRAINED = ("train_accuracy", "test_accuracy", "epoch_time")


def swept(shell: Shell) -> Path:
    """The CSV of the report in which a sweep ends."""
    done = shell.sweep("experiment=table2", "name=mine", *FEW, *NARROW)
    assert done.code == 0, done.err
    (file,) = shell.cwd.glob("outputs/mine/sweeps/*/report/table2.csv")
    return file


@pytest.mark.full
def test_the_command_of_the_report_fills_its_gap(shell: Shell) -> None:
    """What the speedup lacks is D-1, by a part of the sweep that says all that is unusual here."""
    (command,) = re.findall("sparsepipe -m .*", swept(shell).with_name("report.md").read_text())
    words = [word for word in shlex.split(command)[2:] if not word.startswith("paths.")]
    dense = ("paper/trial=one_device", "paper/network=dense", "data.resolution=32")
    filled = shell(*words, *dense)
    assert filled.run.parent == shell.cwd / "outputs" / "mine"
    done = shell("task=report", "name=mine", "task.exhibits=[table2]")
    found = cells(done.run / "table2.csv", *HEADS)
    assert there(done.run / "table2.csv", *HEADS) == {
        (*row, name) for row in (SPARSE, DENSE) for name in (*TRAINED, "speedup")
    }
    assert float(found[*SPARSE, "speedup"]["ours"]) > 0
    assert "scale smoke; generated shapes" in found[*SPARSE, "speedup"]["setting"]
