"""Launchers and sweepers from elsewhere, each an extra: what they need composes, and they run."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest
import yaml
from experiment_harness import Shell
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from sparsepipe.experiment import compose
from sparsepipe.results.files import read_json

PLANS = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")
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
    return pytest.mark.skipif(missing, reason=f"pip install 'sparsepipe[{extra}]'")


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
def test_it_composes_and_takes_settings(override: str, target: str, settings: dict) -> None:
    part = override.partition("=")[0].rpartition("/")[2]
    given = [f"hydra.{part}.{name}={value}" for name, value in settings.items()]
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        config = hydra_compose(
            compose.CONFIG_NAME,
            ["experiment=demo", override, *compose.admit(given)],
            return_hydra_config=True,
        )
    node = config.hydra[part]
    assert node._target_ == f"hydra_plugins.{target}"
    assert {name: node[name] for name in settings} == settings


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), marks=needs("joblib")),
        pytest.param(
            ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"), marks=needs("slurm")
        ),
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)
def test_jobs_that_others_launch(shell: Shell, launcher: tuple[str, ...]) -> None:
    """One that fails beside one that is done: the sweep says so at its end."""
    swept = shell.sweep(*PLANS, "seed=-1,0", *launcher)
    assert swept.code == 2, swept.err
    assert "1 of 2 jobs failed" in swept.err
    (run,) = shell.runs()
    assert (run / "DONE.json").exists()
    (table,) = shell.cwd.glob("outputs/tiny/sweeps/*/table.csv")
    with table.open() as stream:
        rows = list(csv.DictReader(stream))
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
    assert best["best_params"] == {"++task.search": "exact"}  # as Hydra got it
    assert best["best_value"] == bottlenecks_s["exact"] < bottlenecks_s["dp"]
    with found.with_name("table.csv").open() as stream:
        assert {row["task.search"] for row in csv.DictReader(stream)} == {"dp", "exact"}


@pytest.mark.full
@needs("optuna")
@pytest.mark.parametrize("launcher", ["basic", "sparsepipe"])
def test_a_search_whose_jobs_have_no_value_says_so(shell: Shell, launcher: str) -> None:
    """Optuna gives up: what came of the jobs is told all the same, with a remedy."""
    bear = "hydra.sweeper.max_failure_rate=1"
    swept = shell.sweep(*GRID, f"hydra/launcher={launcher}", "objective=botleneck_s", bear)
    assert swept.code == 2, swept.err
    told = swept.err.partition("2 of 2 jobs failed:")[2]
    assert "objective=botleneck_s is no figure" in told
    assert "(nearest: 'bottleneck_s')" in told
    assert "its sweeper does not go on without their values" in told
    assert "remedy: mend the jobs" in told
    assert "Traceback" not in swept.err
    finished = [path.parent for path in shell.cwd.glob("outputs/tiny/*/DONE.json")]
    assert len(finished) == 2
    assert (shell.cwd / "outputs/tiny/ledger.csv").exists()
    # The first failure ends it, unless it is to bear them.
    short = shell.sweep(*GRID, f"hydra/launcher={launcher}", "objective=botleneck_s", "seed=1")
    assert short.code == 2, short.err
    assert "1 of 1 jobs failed:" in short.err
