"""Sweeps through the command line, and the table at their end."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from sparsepipe.config import compose
from sparsepipe.sweep.callbacks import SweepTable
from sparsepipe.sweep.record import records_of
from sparsepipe.utils.files import read_json, write_json
from tests.support.command_line import Shell
from tests.support.emulated_cases import hosts
from tests.support.sweep_cases import leave_record

ONE_EPOCH = "trainer.max_epochs=1"
PLANS = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")


def tables(shell: Shell) -> set[Path]:
    return set(shell.cwd.glob("outputs/tiny/sweeps/*/table.csv"))


def read(table: Path) -> list[dict[str, str]]:
    with table.open() as stream:
        return list(csv.DictReader(stream))


@pytest.mark.full
def test_a_failed_job_beside_one_that_is_done(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # of a terminal in which the whole table has room
    swept = shell.sweep(*PLANS, "seed=-1,0")
    assert swept.code == 2
    (run,) = [Path(line) for line in swept.out.splitlines()]  # and nothing else on stdout
    assert "2 jobs, 1 of them failed" in swept.err
    (table,) = tables(shell)
    assert table.with_name("table.md").read_text() in swept.err
    failed, done = read(table)
    assert [(row["seed"], row["status"]) for row in (failed, done)] == [
        ("-1", "failed"),
        ("0", "finished"),
    ]
    assert "model" not in done, "the same in both"
    assert shell.cwd / done["run"] == run
    result = read_json(run / "result.json")
    assert float(done["bottleneck_s"]) == result["bottleneck_s"]
    assert done["plan"].partition(" at ")[0] == result["plan_config"]
    assert done["kind"] == "simulated"


@pytest.mark.full
def test_trainings_of_a_sweep_beside_each_other(shell: Shell) -> None:
    # The first fails in somebody's own code, before there are ranks that could tell.
    swept = shell.sweep("data.prepare_s=-1,0,0.1", ONE_EPOCH)
    assert swept.code == 1
    assert "ValueError: sleep length" in swept.err
    runs = [Path(line) for line in swept.out.splitlines()]
    (table,) = tables(shell)
    failed, *rows = read(table)
    assert (failed["status"], failed["train_shapes_per_s"]) == ("failed", "")
    rates = [read_json(run / "result.json")["train_shapes_per_s"] for run in runs]
    assert [float(row["train_shapes_per_s"]) for row in rows] == rates
    assert float(rows[1]["ratio_to_first"]) == pytest.approx(rates[1] / rates[0])
    assert [shell.cwd / row["run"] for row in rows] == runs
    # Done again, finished runs are skipped and count with what they had.
    assert shell.sweep("data.prepare_s=0.1,0", ONE_EPOCH).code == 0
    (again,) = tables(shell) - {table}
    assert [row["run"] for row in read(again)] == [rows[1]["run"], rows[0]["run"]]


@pytest.mark.full
def test_what_is_emulated_beside_what_is_simulated(shell: Shell) -> None:
    *here, _ = hosts(shell.cwd)
    plan = ("parallel=pipeline", "parallel.plan.config=1-2", "parallel.plan.cuts=[2]")
    swept = shell.sweep(*here, *plan, "task=simulate,emulate")
    assert swept.code == 0, swept.err
    runs = [Path(line) for line in swept.out.splitlines()]
    results = [read_json(run / "result.json") for run in runs]
    (table,) = tables(shell)
    rows = read(table)
    assert [row["kind"] for row in rows] == ["simulated", "emulated"]
    keys = ("simulated_shapes_per_s", "samples_per_s")
    assert [float(row[key]) for row, key in zip(rows, keys, strict=True)] == [
        result[key] for result, key in zip(results, keys, strict=True)
    ]
    assert (rows[0]["samples_per_s"], rows[1]["simulated_shapes_per_s"]) == ("", "")
    assert [row["ratio_to_first"] for row in rows] == ["1.0", "1.0"], "each of its kind"
    assert [row["epoch_minibatches"] for row in rows] == ["154", "24"]


def test_a_job_that_raises_is_a_failed_one_and_none_at_all_make_no_table(tmp_path: Path) -> None:
    write_json(tmp_path / "run" / "result.json", {"train_shapes_per_s": 2.0})
    sweep = tmp_path / "sweep"
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}})
    leave_record(sweep, 0, "++seed=0", run=None)
    SweepTable().on_multirun_end(config)
    assert {path.name for path in sweep.iterdir()} == {"jobs"}
    leave_record(sweep, 1, "++seed=1", run=tmp_path / "run")
    SweepTable().on_multirun_end(config)
    first, second = read(sweep / "table.csv")
    assert (first["seed"], first["status"]) == ("0", "failed")
    assert (second["seed"], second["train_shapes_per_s"]) == ("1", "2.0")


def test_sweeps_that_begin_in_the_same_second_share_nothing() -> None:
    found = set()
    for _ in range(3):  # within milliseconds
        with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
            config = hydra_compose(compose.CONFIG_NAME, return_hydra_config=True)
        found.add(config.hydra.sweep.dir)
    assert len(found) == 3


def test_jobs_stand_in_their_order(tmp_path: Path) -> None:
    for number in (10, 9, 0):
        leave_record(tmp_path, number, f"seed={number}", run=tmp_path / "run")
    assert [record.number for record in records_of(tmp_path)] == [0, 9, 10]
