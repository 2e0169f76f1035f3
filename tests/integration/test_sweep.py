"""Sweeps through the command line, and launchers and sweepers from elsewhere, each an extra."""

from __future__ import annotations

import csv
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.utils import JobReturn, JobStatus
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from sparsepipe.config import compose
from sparsepipe.sweep.callbacks import SweepEnd, SweepSearch
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed

ONE_EPOCH = "trainer.max_epochs=1"
PLANS = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")


def tables(shell: Shell) -> set[Path]:
    return set(shell.cwd.glob("outputs/tiny/sweeps/*/table.csv"))


def read(table: Path) -> list[dict[str, str]]:
    with table.open() as stream:
        return list(csv.DictReader(stream))


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


def test_sweeps_that_begin_in_the_same_second_share_nothing() -> None:
    found = set()
    for _ in range(3):  # within milliseconds
        with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
            config = hydra_compose(compose.CONFIG_NAME, return_hydra_config=True)
        found.add(config.hydra.sweep.dir)
    assert len(found) == 3


SWEPT = {"demo": 1, "table2": 3 * 2 * 4, "fig8": 4 * 2}
"""Jobs of experiments by themselves; the paper's are sweeps."""
FEW = ("scale=smoke", "data.source.train_per_class=1", "data.source.test_per_class=1")
GRID = (
    *PLANS,
    "task.search=dp,exact",
    "hydra/sweeper=optuna",
    "hydra/sweeper/sampler=grid",
    "hydra.sweeper.n_jobs=1",
)
PLUGINS = {
    "slurm": "hydra_plugins.hydra_submitit_launcher",
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "optuna": "hydra_plugins.hydra_optuna_sweeper",
}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def needs(extra: str) -> pytest.MarkDecorator:
    missing = not _installed(PLUGINS[extra])
    return pytest.mark.skipif(missing, reason=f"pip install -e '.[{extra}]'")


LAUNCHERS = pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), marks=needs("joblib")),
        pytest.param(
            ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"), marks=needs("slurm")
        ),
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)


def with_hydra(*overrides: str) -> DictConfig:
    """The configuration that Hydra's own is a part of."""
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        return hydra_compose(
            compose.CONFIG_NAME, compose.admit(overrides), return_hydra_config=True
        )


@pytest.mark.parametrize("experiment", SWEPT)
@pytest.mark.parametrize(
    ("override", "target", "settings"),
    [
        pytest.param(
            "hydra/launcher=submitit_slurm",
            "hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
            {"partition": "gpu", "gpus_per_node": 4, "cpus_per_task": 32, "timeout_min": 600},
            marks=needs("slurm"),
        ),
        pytest.param(
            "hydra/launcher=submitit_local",
            "hydra_submitit_launcher.submitit_launcher.LocalLauncher",
            {"timeout_min": 600},
            marks=needs("slurm"),
        ),
        pytest.param(
            "hydra/launcher=joblib",
            "hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
            {"n_jobs": 2},
            marks=needs("joblib"),
        ),
        pytest.param(
            "hydra/sweeper=optuna",
            "hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper",
            {"direction": "maximize", "n_trials": 12, "n_jobs": 1, "storage": "sqlite:///a.db"},
            marks=needs("optuna"),
        ),
    ],
)
def test_it_composes_and_takes_settings(
    override: str, target: str, settings: dict, experiment: str
) -> None:
    """In the place of what the experiment names, whose sweep stays what it is."""
    part = override.partition("=")[0].rpartition("/")[2]
    given = [f"hydra.{part}.{name}={value}" for name, value in settings.items()]
    asked = (f"experiment={experiment}", override, *given)
    config = with_hydra(*asked)
    node = config.hydra[part]
    assert node._target_ == f"hydra_plugins.{target}"
    assert {name: node[name] for name in settings} == settings
    assert type(instantiate(node)).__name__ == target.rpartition(".")[2]
    plain = with_hydra(f"experiment={experiment}")
    assert config.hydra.sweeper.params == plain.hydra.sweeper.params
    assert composed(*asked).to_dict()["name"] == experiment


@needs("optuna")
@pytest.mark.parametrize("experiment", ["table2", "fig8"])
def test_optuna_searches_what_an_experiment_sweeps(experiment: str) -> None:
    """But for what the command line sets."""
    from hydra_plugins.hydra_optuna_sweeper._impl import create_params_from_overrides

    config = with_hydra(f"experiment={experiment}", "hydra/sweeper=optuna")
    swept = [f"{name}={value}" for name, value in config.hydra.sweeper.params.items()]
    searched, fixed = create_params_from_overrides(swept)
    assert math.prod(len(found.choices) for found in searched.values()) == SWEPT[experiment]
    assert fixed == {"scale": "smoke"}
    given = compose.admit(["scale=desk", "paper/network=sparse", "data.resolution=32"])
    _, fixed = create_params_from_overrides([*swept, *given])
    assert fixed == {"scale": "desk", "paper/network": "sparse", "++data.resolution": "32"}
    assert set(fixed) - {"scale"} <= set(searched), "by the same names, which is how they give way"


@needs("optuna")
@pytest.mark.parametrize("failing", [0, 1])
def test_the_best_of_a_grid_is_written_whichever_job_fails(tmp_path: Path, failing: int) -> None:
    """Optuna's sweeper with jobs that are not run."""
    config = with_hydra("experiment=table2", *GRID[len(PLANS) + 1 :], f"hydra.sweep.dir={tmp_path}")
    config.hydra.sweeper.params = {"seed": "choice(0, 1)"}
    SweepEnd().on_multirun_start(config)
    sweeper = instantiate(config.hydra.sweeper).sweeper
    tried: list[str] = []

    def launch(overrides: list[tuple[str, ...]], **_: int) -> list[JobReturn]:
        tried.append(overrides[0][0])
        value = None if len(tried) - 1 == failing else 0.5
        return [JobReturn(_return_value=value, status=JobStatus.COMPLETED)]

    sweeper.config, sweeper.sweep_dir = config, str(tmp_path)
    sweeper.hydra_context, sweeper.launcher = object(), SimpleNamespace(launch=launch)
    sweeper.sweep([])
    found = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert found["best_value"] == 0.5
    assert found["best_params"] == {"seed": int(tried[1 - failing][-1])}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            "best_params: {++data.batch_size: 4, model: mlp}\nbest_value: 0.5\n",
            {"best_params": {"data.batch_size": 4, "model": "mlp"}, "best_value": 0.5},
        ),
        (
            "solutions:\n- params: {++seed: 1}\n  values: [0.5, 2.0]\n",  # of several objectives
            {"solutions": [{"params": {"seed": 1}, "values": [0.5, 2.0]}]},
        ),
    ],
)
def test_the_best_has_the_names_that_were_given(
    tmp_path: Path, written: str, expected: dict
) -> None:
    file = tmp_path / "optimization_results.yaml"
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    SweepSearch().on_multirun_end(config)
    assert not file.exists(), "there was no search"
    file.write_text(written)
    SweepSearch().on_multirun_end(config)
    assert yaml.safe_load(file.read_text()) == expected


@pytest.mark.full
@LAUNCHERS
def test_jobs_that_others_launch(shell: Shell, launcher: tuple[str, ...]) -> None:
    """One that fails beside one that is done: the sweep says so at its end."""
    swept = shell.sweep(*PLANS, "seed=-1,0", *launcher)
    assert swept.code == 2, swept.err
    assert "1 of 2 jobs failed" in swept.err
    (run,) = shell.runs()
    assert (run / "DONE.json").exists()
    (table,) = tables(shell)
    rows = read(table)
    assert [(row["seed"], row["status"]) for row in rows] == [("-1", "failed"), ("0", "finished")]
    assert shell.cwd / rows[1]["run"] == run


@pytest.mark.full
@needs("optuna")
def test_the_best_is_searched_for_by_optuna(shell: Shell) -> None:
    """Of two searches, on a grid: the plan whose bottleneck is the least, by the runs' results."""
    swept = shell.sweep(*GRID, "objective=bottleneck_s")
    assert swept.code == 0, swept.err
    runs = [Path(line) for line in swept.out.splitlines()]
    bottlenecks_s = {
        yaml.safe_load((run / "config.yaml").read_text())["task"]["search"]: read_json(
            run / "result.json"
        )["bottleneck_s"]
        for run in runs
    }
    assert set(bottlenecks_s) == {"dp", "exact"}
    (found,) = shell.cwd.glob("outputs/tiny/sweeps/*/optimization_results.yaml")
    best = yaml.safe_load(found.read_text())
    assert best["best_params"] == {"task.search": "exact"}
    assert best["best_value"] == bottlenecks_s["exact"] < bottlenecks_s["dp"]
    assert {row["task.search"] for row in read(found.with_name("table.csv"))} == {"dp", "exact"}


@pytest.mark.full
@needs("optuna")
@pytest.mark.parametrize("launcher", ["basic", "sparsepipe"])
def test_a_search_whose_jobs_have_no_value_says_so(shell: Shell, launcher: str) -> None:
    """No failure keeps other jobs from being done; then Optuna gives up, and all is told."""
    swept = shell.sweep(*GRID, f"hydra/launcher={launcher}", "objective=botleneck_s")
    assert swept.code == 2, swept.err
    before, _, told = swept.err.partition("2 of 2 jobs failed:")
    assert "objective=botleneck_s is not a number" in told
    assert "(nearest: 'bottleneck_s')" in told
    assert "its sweeper needs the values of the failed jobs" in told
    assert "remedy: correct the jobs" in told
    assert "max_failure_rate" not in told, "which has nothing to do with it"
    assert "Traceback" not in before, "of a job"
    assert "Traceback (" in told, "of the sweeper"
    finished = [path.parent for path in shell.cwd.glob("outputs/tiny/*/DONE.json")]
    assert len(finished) == 2
    assert (shell.cwd / "outputs/tiny/ledger.csv").exists()
