"""The paper's tables and figures through the command line, on a few shapes (``make smoke``)."""

from __future__ import annotations

import csv
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.launch.job import run_job
from sparsepipe.runs.ledger import load_results
from sparsepipe.utils.files import read_json, write_json
from tests.integration.test_results import check
from tests.support.command_line import Shell, composed, orphans
from tests.support.paths import python_path, run_python
from tests.support.reported_cells import cells, there

FEW = ("scale=smoke", "data.source.train_per_class=1", "data.source.test_per_class=1")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "desk_steps.py"


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
    """What the speedup lacks is D-1, by the sweep's command and what the table's title names."""
    (command,) = re.findall("sparsepipe -m .*", swept(shell).with_name("report.md").read_text())
    words = [word for word in shlex.split(command)[2:] if not word.startswith("paths.")]
    dense = ("paper/trial=one_device", "paper/network=dense", "data.resolution=32")
    filled = shell(*words, *FEW[1:], *dense)
    assert filled.run.parent == shell.cwd / "outputs" / "mine"
    done = shell("task=report", "name=mine", "task.exhibits=[table2]")
    found = cells(done.run / "table2.csv", *HEADS)
    assert there(done.run / "table2.csv", *HEADS) == {
        (*row, name) for row in (SPARSE, DENSE) for name in (*TRAINED, "speedup")
    }
    assert float(found[*SPARSE, "speedup"]["ours"]) > 0
    assert "scale smoke; generated shapes" in found[*SPARSE, "speedup"]["setting"]


LIMIT_S = 600
LAYERS = 52  # of the paper's VGG16


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for all of them, so that shapes are made once."""
    return tmp_path_factory.mktemp("smoke")


def run(place: Path, command: str) -> list[Path]:
    """The runs that a command tells of."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPARSEPIPE")}
    env = {**inherited, "PYTHONPATH": python_path()}
    done = run_python(place, "-m", *command.split(), env=env, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert not orphans(place)
    return [Path(line) for line in done.stdout.splitlines() if Path(line).is_dir()]


@pytest.mark.smoke
@pytest.mark.timeout(900)
def test_fig_8_at_its_coarsest_grid(place: Path) -> None:
    """Both networks from the sweep's command to its report and ledger."""
    run(place, "sparsepipe -m experiment=fig8 scale=smoke data.resolution=32")
    (file,) = place.glob("outputs/fig8/sweeps/*/report/fig8.csv")
    told = {
        key: float(cell["ours"])
        for key, cell in cells(file, "grid", "network").items()
        if key in there(file, "grid", "network")
    }
    quantities = ("train_accuracy", "test_accuracy", "inference_rate", "memory")
    assert set(told) == {("32³", net, name) for net in ("dense", "sparse") for name in quantities}
    for (_, _, quantity), value in told.items():
        assert 0 <= value <= 100 if "accuracy" in quantity else value > 0
    assert file.with_suffix(".png").exists()
    ledger = load_results(place / "outputs" / "fig8" / "ledger.csv")
    assert sorted(ledger["representation"]) == ["dense", "sparse"]
    assert ledger["fits"].all()
    assert (ledger["step_memory_bytes"] <= ledger["budget_bytes"]).all()


@pytest.mark.smoke
@pytest.mark.timeout(900)
def test_table_1_has_a_column_of_this_machine(place: Path) -> None:
    (path,) = run(place, "sparsepipe experiment=table1 scale=smoke")
    with (path / "table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    (ours,) = [name for name in rows[0] if name.endswith("(measured here)")]
    assert sum(name.endswith("(paper)") for name in rows[0]) == 3
    assert all(row[ours] for row in rows)


@pytest.mark.smoke
@pytest.mark.timeout(900)
def test_fig_7_has_every_layer_of_this_machine_and_of_the_authors(place: Path) -> None:
    (path,) = run(place, "sparsepipe experiment=fig7 scale=smoke")
    with (path / "shares.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == LAYERS
    shares = [name for name in rows[0] if name != "layer"]
    devices = {name.rpartition(": ")[0] for name in shares}
    assert sum(name.endswith("(authors)") for name in devices) == 3
    assert len(devices) == 4
    assert all(float(rows[-1][name]) == pytest.approx(1) for name in shares)
    assert (path / "shares.png").exists()


ROW = ("experiment=bigconv", "scale=smoke", "paper/network=cnn2d", "paper.workers=one")
SIZES = "task.sizes=[[32,32],[64,64]]"


@pytest.fixture
def one_thread(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def measured(*overrides: str) -> tuple[Path, dict[str, Any]]:
    path = run_job(composed(*ROW, SIZES, *overrides)).path
    return path, read_json(path / "result.json")


@pytest.mark.usefixtures("one_thread")
def test_a_size_above_the_budget_is_counted_and_not_trained() -> None:
    path, result = measured("task.budget_bytes=1e6", "task.timed_steps=1")
    check(path)
    assert "MASTER_PORT" not in os.environ, "the next ranks of this process could not meet"
    small, large = result["measured_sizes"]
    assert small["fits"]
    assert small["step_s"] > 0
    assert 0 < small["saved_bytes"] < small["peak_bytes"] <= 1e6 < large["peak_bytes"]
    assert (large["fits"], large["limited_by"], "step_s" in large) == (False, "over_budget", False)
    assert (result["largest_size"], result["refused_size"]) == ([32, 32], [64, 64])
    assert result["step_memory_bytes"] == small["peak_bytes"]
    assert (result["strategy"], small["grid"]) == ("spatial", [1, 1])


@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_run_keeps_the_sizes_that_it_has() -> None:
    path, result = measured()
    kept = path / "steps_32x32.json"
    write_json(kept, {**read_json(kept), "peak_bytes": 7})
    (path / "DONE.json").unlink()
    again, resumed = measured()
    assert again == path
    assert resumed["measured_sizes"][0]["peak_bytes"] == 7
    assert resumed["measured_sizes"][1:] == result["measured_sizes"][1:]


@pytest.mark.full
@pytest.mark.usefixtures("one_thread", "networks_for_ranks")
def test_a_sample_that_one_device_cannot_hold_trains_on_four() -> None:
    """With the same losses, and what each keeps is its share."""
    alone = measured("task.budget_bytes=1e6")[1]["measured_sizes"][1]
    words = ("parallel.devices=4", "parallel.grid=[2,2]", "task.budget_bytes=1e6")
    shared = measured(*words)[1]["measured_sizes"][1]
    assert (alone["fits"], shared["fits"], shared["grid"]) == (False, True, [2, 2])
    assert shared["losses"] == pytest.approx(alone["losses"], abs=1e-5)
    assert shared["saved_bytes"] <= 1.05 * alone["saved_bytes"] / 4


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("experiment", "quantities"),
    [
        ("bigconv", {"memory", "over_one", "share", "saved", "largest"}),
        ("convnext_tp", {"memory", "over_one", "share", "saved", "largest"}),
        ("multi_dsn_memory", {"memory", "over_two", "saved"}),
        ("multi_dsn", {"source_only", "dsn", "gain"}),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_the_smallest_sweep_ends_with_a_report_that_lacks_nothing(
    workplace: Path, experiment: str, quantities: set[str]
) -> None:
    assert len(run(workplace, f"sparsepipe -m experiment={experiment} scale=smoke")) == 2
    (file,) = workplace.glob(f"outputs/{experiment}/sweeps/*/report/{experiment}.csv")
    with file.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["quantity"] for row in rows} >= quantities
    assert "missing" not in {row["status"] for row in rows}
    assert file.with_suffix(".png").exists()
