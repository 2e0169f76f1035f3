"""experiment=fig9: all jobs of its sweep compose, and a small sweep ends with the figure."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from sparsepipe.config import compose
from sparsepipe.launch.job import run_job
from sparsepipe.paper.chapters.fig9 import _SWEPT, GPUS, STRATEGIES
from sparsepipe.paper.report_sweep import SweepReport
from sparsepipe.tasks.emulate import as_emulated
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed
from tests.support.reported_runs import batch_of
from tests.support.sweep_cases import leave_record

FIG9 = "experiment=fig9"
TASKS = [f"paper/fig9_{kind}" for kind in
         ("simulated_50", "simulated_100", "simulated_125", "emulated")]  # fmt: skip
HARDWARE = [f"paper_{gpus}gpu" for gpus in GPUS]


def with_hydra(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        return hydra_compose(compose.CONFIG_NAME, list(overrides), return_hydra_config=True)


def swept(*overrides: str) -> list[list[str]]:
    """The jobs that Hydra's sweeper makes of a command."""
    return [[item for item in job if item != FIG9] for job in batch_of(FIG9, *overrides)]


def test_the_sweep_is_the_figure() -> None:
    wanted = itertools.product(TASKS, HARDWARE, STRATEGIES)
    assert swept() == [
        [f"task={task}", f"hardware={hardware}", f"parallel={parallel}"]
        for task, hardware, parallel in wanted
    ]
    fewer = swept("task=paper/fig9_simulated_125", "parallel=dp,hete_mp")
    assert len(fewer) == 2 * len(HARDWARE)
    assert {job[0] for job in fewer} == {"task=paper/fig9_simulated_125"}
    assert with_hydra(FIG9).hydra.launcher._target_.endswith("SparsePipeLauncher")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_are_those_of_table_iii_but_exact_is_for_its_link(strategy: str) -> None:
    config = composed(FIG9, "hardware=paper_7gpu", f"parallel={strategy}", f"task={TASKS[0]}")
    simulated = config.replace(parallel=config.task.get("parallel"))
    assert simulated.parallel == config.parallel
    search = config.plan_search
    if strategy in ("dp", "paper_mp"):
        assert search is None
    else:
        assert search is not None
        asked = None if strategy == "exact" else 60e6
        assert (search.search, search.bandwidth_bytes_per_s) == (strategy, asked)
        other = composed(FIG9, f"parallel={strategy}", "parallel.search.bandwidth_bytes_per_s=1e9")
        assert other.parallel.search.bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_the_link_of_its_panel(task: str) -> None:
    config = composed(FIG9, "hardware=paper_8gpu", f"task={task}")
    name = config.task.locate().name
    kind = "simulated" if name == "simulate" else "emulated"
    link = config.task.get("link_bytes_per_s")
    (expected,) = [e for e in _SWEPT if (e.kind, e.link_bytes_per_s) == (kind, link)]
    assert task == f"paper/fig9_{kind}" + (f"_{link / 1e6:g}" if kind == "simulated" else "")
    if kind == "emulated":
        assert expected.network == "namespaces"
        assert as_emulated(config).to_dict()["hardware"]["link_bytes_per_s"] == 125e6
        assert config.hardware.get("value")["link"]["bytes_per_s"] == 125e6, "1 Gb/s"


@pytest.mark.parametrize(
    ("parallel", "time_scale"), [("dp", 2.5), ("paper_mp", 2.5), ("hete_mp", 2.5), ("exact", 10)]
)
def test_emulated_sums_inside_hosts_have_time(parallel: str, time_scale: float) -> None:
    config = composed(FIG9, "task=paper/fig9_emulated", f"parallel={parallel}")
    assert as_emulated(config).to_dict()["hardware"]["time_scale"] == time_scale


@pytest.mark.full
def test_a_sweep_in_part_ends_with_its_figure(tmp_path: Path) -> None:
    """Real simulations, given to the callback as Hydra gives them."""
    told = {}
    for number, strategy in enumerate(("paper_mp", "hete_mp", "exact")):
        overrides = ["hardware=paper_5gpu", f"parallel={strategy}", "task=paper/fig9_simulated_125"]
        run = None
        if strategy != "exact":
            asked = (f"paths.outputs={tmp_path}", FIG9, *overrides, "task.timeline_minibatches=2")
            run = run_job(composed(*asked)).path
            told[strategy] = read_json(run / "result.json")
        leave_record(tmp_path / "sweep", number, *overrides, run=run)
    config = with_hydra(FIG9, f"paths.outputs={tmp_path}")
    OmegaConf.update(config, "hydra.sweep.dir", str(tmp_path / "sweep"), force_add=True)
    SweepReport().on_multirun_end(config)
    made = tmp_path / "sweep" / "report"
    rows = [
        row
        for row in csv.DictReader((made / "fig9.csv").open())
        if (row["setting"], row["GPUs"]) == ("simulated, 125 MB/s between hosts", "5")
    ]
    ours = {(row["strategy"], row["quantity"]): row["ours"] for row in rows}
    for name, result in zip(("MP, the paper's split", "HETE-MP"), told.values(), strict=True):
        for column, over in (("speedup", "dp"), ("speedup_without_overlap", "dp_without_overlap")):
            assert float(ours[name, column]) == pytest.approx(result[f"speedup_over_{over}"])
    assert ours["MP, the paper's split", "plan"] == "1-2-1-1 at 14, 24, 34"
    pace = [result["minibatches_per_s"] for result in told.values()]
    split = float(ours["MP, the paper's split", "over_hete_mp"])
    assert split == pytest.approx(pace[0] / pace[1])
    assert ours["exact", "speedup"] == "", "its job has failed"
    text = (made / "report.md").read_text()
    assert "job 3 (parallel=exact)" in text, "which differs from the others by that"
    (picture,) = made.glob("*.png")
    with Image.open(picture) as image:
        image.verify()


@pytest.mark.full  # three processes of their own
def test_the_command_ends_with_the_figure(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sparsepipe", "-m", FIG9, "hardware=paper_5gpu"),
            *("parallel=hete_mp", "task=paper/fig9_simulated_50,paper/fig9_simulated_125"),
        ],
        cwd=tmp_path,
        env=Shell(tmp_path).environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("outputs/fig9/sweeps/*/report/fig9.csv")
    rows = [row for row in csv.DictReader(table.open()) if row["quantity"] == "minibatch"]
    there = [row["setting"] for row in rows if row["status"] == "there"]
    assert there == [f"simulated, {link} MB/s between hosts" for link in (50, 125)]
    sweep = table.parents[1]
    assert sorted(path.name for path in sweep.glob("jobs/*/log.txt")) == 2 * ["log.txt"]
    assert str(table.with_name("report.html")) in done.stderr
    assert not list(sweep.glob("fig9.*")), "one answer to one question"
