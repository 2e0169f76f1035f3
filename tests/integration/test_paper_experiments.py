"""The paper's tables and figures through the command line, on a few shapes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, rows
from tests.support.reported_cells import cells, there

pytestmark = pytest.mark.full

FEW = ("scale=smoke", "data.source.train_per_class=1", "data.source.test_per_class=1")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "desk_steps.py"


def test_a_cell_of_table_2_on_one_device_and_on_four(shell: Shell) -> None:
    asked = (
        "paper/network=sparse_p025",
        "data.resolution=32",
        "paper/trial=one_device,four_devices",
    )
    swept = shell.sweep("experiment=table2", *FEW, *asked)
    assert swept.code == 0, swept.err
    results = [read_json(path) for path in shell.cwd.glob("outputs/table2/*/result.json")]
    trained = {result["ranks"]: result for result in results}
    assert set(trained) == {1, 4}
    assert trained[1]["steps"] == trained[4]["steps"] == 4
    for result in trained.values():
        assert (result["scale"], result["data.point_ratio"]) == ("smoke", 0.25)
        (row,) = rows(shell.cwd / "outputs" / "table2" / result["run_id"])
        assert result["train/accuracy"] == float(row["train/accuracy"])
        assert 0 <= result["test/accuracy"] <= 1
        assert result["epoch_time_s"] > 0
    (file,) = shell.cwd.glob("outputs/table2/sweeps/*/report/table2.csv")
    wanted = ("train_accuracy", "test_accuracy", "epoch_time")
    trained_cells = {("32³", str(n), "sparse", "0.25", name) for n in (1, 4) for name in wanted}
    # Whether four ranks have a speedup, or none, or lack D-1 depends on the cores.
    optional = {("32³", "4", "sparse", "0.25", "speedup")}
    found = there(file, "grid", "devices", "network", "p")
    assert found - optional == trained_cells


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


def test_figure_7_has_the_authors_gpus_beside_this_machine(shell: Shell) -> None:
    done = shell("experiment=fig7", *FEW, "data.resolution=16", "task.num_warmup=0")
    with (done.run / "shares.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert len(table) == 52
    devices = {name.rpartition(": ")[0] for name in table[0]} - {""}
    authors = {f"{gpu} (authors)" for gpu in ("TITAN Xp", "TITAN V", "RTX 2080 Ti")}
    assert len(devices - authors) == 1
    assert authors < devices
    assert all(float(share) == pytest.approx(1) for name, share in table[-1].items()
               if name != "layer")  # fmt: skip
    assert (done.run / "shares.png").exists()


def test_the_benchmark_estimates_what_sweeps_take(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--scale", "smoke", "--steps", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "table2: 16 trainings, " in done.stdout
    assert "fig8: 6 trainings, " in done.stdout
