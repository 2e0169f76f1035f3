"""experiment=fig9: all jobs of its sweep compose, and a small sweep ends with the figure."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from experiment_harness import Shell, composed
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from sweep_cases import leave_record

from sparsepipe.experiment import compose
from sparsepipe.experiment.asked_emulation import as_emulated
from sparsepipe.experiment.fig9 import Fig9
from sparsepipe.experiment.fig9_jobs import EXPECTED, GPUS, STRATEGIES
from sparsepipe.experiment.job import run_job
from sparsepipe.experiment.planned import searched_plan_of
from sparsepipe.experiment.signature import parameters_of
from sparsepipe.results.files import read_json

FIG9 = "experiment=fig9"
TASKS = ["fig9/simulated_50", "fig9/simulated_100", "fig9/simulated_125", "fig9/emulated"]
HARDWARE = [f"paper_{gpus}gpu" for gpus in GPUS]


def with_hydra(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        return hydra_compose(compose.CONFIG_NAME, list(overrides), return_hydra_config=True)


def swept(*overrides: str) -> list[list[str]]:
    """The jobs that Hydra's sweeper makes of a command."""
    params = with_hydra(FIG9).hydra.sweeper.params
    given = [f"{key}={value}" for key, value in params.items()] + [FIG9, *overrides]
    parsed = OverridesParser.create().parse_overrides(given)
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    return [[item for item in job if item != FIG9] for job in jobs]


def test_the_sweep_is_the_figure() -> None:
    wanted = itertools.product(TASKS, HARDWARE, STRATEGIES)
    assert swept() == [
        [f"task={task}", f"hardware={hardware}", f"parallel={parallel}"]
        for task, hardware, parallel in wanted
    ]
    fewer = swept("task=fig9/simulated_125", "parallel=dp,hete_mp")
    assert len(fewer) == 2 * len(HARDWARE)
    assert {job[0] for job in fewer} == {"task=fig9/simulated_125"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_are_those_of_table_iii_but_exact_is_for_its_link(strategy: str) -> None:
    config = composed(FIG9, "hardware=paper_7gpu", f"parallel={strategy}", f"task={TASKS[0]}")
    assert config["task"]["parallel"] == config["parallel"]
    search = searched_plan_of(config)
    if strategy in ("dp", "paper_mp"):
        assert search is None
    else:
        assert search is not None
        asked = None if strategy == "exact" else 60e6
        assert (search.search, search.bandwidth_bytes_per_s) == (strategy, asked)
        other = composed(FIG9, f"parallel={strategy}", "parallel.search.bandwidth_bytes_per_s=1e9")
        assert other["parallel"]["search"]["bandwidth_bytes_per_s"] == 1e9


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_the_link_of_its_panel(task: str) -> None:
    config = composed(FIG9, "hardware=paper_8gpu", f"task={task}")
    name = str(config["task"]["_target_"]).rpartition(".")[2]
    kind = "simulated" if name == "simulate" else "emulated"
    link = config["task"]["link_bytes_per_s"]
    (expected,) = [e for e in EXPECTED if (e.kind, e.link_bytes_per_s) == (kind, link)]
    assert task == f"fig9/{kind}" + (f"_{link / 1e6:g}" if kind == "simulated" else "")
    if kind == "emulated":
        assert expected.network == "namespaces"
        assert as_emulated(config)["hardware"]["link_bytes_per_s"] == 125e6
        assert config["hardware"]["value"]["link"]["bytes_per_s"] == 125e6, "1 Gb/s"


@pytest.mark.parametrize(
    ("parallel", "time_scale"), [("dp", 2.5), ("paper_mp", 2.5), ("hete_mp", 2.5), ("exact", 10)]
)
def test_emulated_sums_inside_hosts_have_time(parallel: str, time_scale: float) -> None:
    config = composed(FIG9, "task=fig9/emulated", f"parallel={parallel}")
    assert as_emulated(config)["hardware"]["time_scale"] == time_scale


def test_without_a_sweep_it_is_one_bar() -> None:
    config = composed(FIG9)
    assert config["task"]["link_bytes_per_s"] == 125e6
    assert config["parallel"]["search"]["search"] == "hete_mp"
    assert sum(d["count"] for h in config["hardware"]["value"]["hosts"] for d in h["devices"]) == 5


def test_the_chart_is_drawn_by_what_hydra_calls() -> None:
    config = with_hydra(FIG9)
    target = config.hydra.callbacks.fig9._target_
    assert target == f"{Fig9.__module__}.{Fig9.__name__}"
    assert parameters_of(target).required == ()
    assert "fig9" not in with_hydra("experiment=table3").hydra.callbacks


def test_a_sweep_in_part_ends_with_its_figure(tmp_path: Path) -> None:
    """Real simulations, given to the callback as Hydra gives them."""
    runs = {}
    sweep = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "sweep")}}})
    for number, strategy in enumerate(("paper_mp", "hete_mp", "exact")):
        overrides = ["hardware=paper_5gpu", f"parallel={strategy}", "task=fig9/simulated_125"]
        run = None
        if strategy != "exact":
            short = "task.timeline_minibatches=2"
            run = run_job(composed(f"paths.outputs={tmp_path}", FIG9, *overrides, short)).path
            runs[strategy] = read_json(run / "result.json")
        choices = with_hydra(FIG9, *overrides).hydra.runtime.choices
        leave_record(tmp_path / "sweep", number, *overrides, run=run, choices=choices)
    Fig9().on_multirun_end(sweep)
    rows = list(csv.DictReader((tmp_path / "sweep" / "fig9.csv").open()))
    assert [row["strategy"] for row in rows[:2]] == ["paper_mp", "hete_mp"]
    assert rows[2]["status"] == "failed"
    for row, result in zip(rows, runs.values(), strict=False):
        assert float(row["speedup_over_dp"]) == pytest.approx(result["speedup_over_dp"])
        assert (row["gpus"], row["link_mb_per_s"], row["kind"]) == ("5", "125.0", "simulated")
    assert rows[0]["plan"] == "1-2-1-1 at 14, 24, 34"
    text = (tmp_path / "sweep" / "fig9.md").read_text()
    assert "failed: parallel=exact hardware=paper_5gpu task=fig9/simulated_125" in text
    with Image.open(tmp_path / "sweep" / "fig9.png") as picture:
        picture.verify()


def test_without_any_figure_nothing_is_written(tmp_path: Path) -> None:
    leave_record(tmp_path, 0, run=None)
    Fig9().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    assert {path.name for path in tmp_path.iterdir()} == {"jobs"}


def test_its_jobs_run_beside_each_other() -> None:
    assert with_hydra(FIG9).hydra.launcher._target_.endswith("SparsePipeLauncher")


@pytest.mark.full  # three processes of their own
def test_the_command_ends_with_the_figure(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sparsepipe", "-m", FIG9, "hardware=paper_5gpu"),
            *("parallel=hete_mp", "task=fig9/simulated_50,fig9/simulated_125"),
        ],
        cwd=tmp_path,
        env=Shell(tmp_path).environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("outputs/fig9/sweeps/*/fig9.csv")
    links = [row["link_mb_per_s"] for row in csv.DictReader(table.open())]
    assert links == ["50.0", "125.0"]
    assert sorted(path.name for path in table.parent.glob("jobs/*/log.txt")) == 2 * ["log.txt"]
    assert table.with_name("fig9.md").read_text() in done.stderr
