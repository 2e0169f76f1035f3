"""Groups of the configuration that change how a training runs or where its metrics go."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sparsepipe.config.compose import CONFIG_NAME, config_dir
from sparsepipe.errors import ConfigError
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed

SMALL = ("trainer.max_epochs=1", "trainer.limit_train_batches=2")


@pytest.mark.parametrize("option", ["one_batch", "overfit", "profiler", "detect_anomaly"])
def test_debugging_runs_end(job: Callable[..., Path], option: str) -> None:
    run = job(*SMALL, f"debug={option}", "trainer.enable_model_summary=false")
    assert run.parent.name == "debug"
    assert read_json(run / "result.json")["kind"] == "measured"


@pytest.mark.parametrize("option", ["one_batch", "overfit", "profiler", "detect_anomaly"])
def test_debugging_runs_start_anew(option: str) -> None:
    assert composed(f"debug={option}").force
    assert not composed(f"debug={option}", "force=false").force


def test_several_callbacks(job: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    stop = "callbacks.early_stopping"
    job(
        *SMALL,
        "callbacks=[model_summary,early_stopping]",
        f"{stop}.monitor=train/loss",
        f"{stop}.mode=min",
    )
    assert "Trainable params" in capsys.readouterr().out


def test_early_stopping_composes() -> None:
    spec = composed("callbacks=early_stopping", "callbacks.early_stopping.patience=2")
    assert spec.callbacks["early_stopping"].arguments["patience"] == 2
    with pytest.raises(ConfigError, match=r"nearest: 'callbacks\.early_stopping\.patience'"):
        composed("callbacks=early_stopping", "callbacks.early_stopping.patiense=2")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("callbacks=early_stopping", "callbacks.early_stopping.monitor"),
        ("objective=val/accuracy", "objective"),
    ],
)
def test_what_watches_a_validation_needs_one(
    job: Callable[..., Path], override: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key} is val/accuracy, and nothing is") as refused:
        job(*SMALL, override, "data.val_size=0")
    assert "data.val_share" in refused.value.remedy


@pytest.mark.parametrize("logger", ["tensorboard", "mlflow"])
def test_loggers_beside_the_metrics_file(job: Callable[..., Path], logger: str) -> None:
    if importlib.util.find_spec(logger) is None:
        pytest.skip(f"{logger} is not installed: pip install 'sparsepipe[{logger}]'")
    run = job(*SMALL, f"logger=[csv,{logger}]")
    assert (run / "metrics.csv").is_file()
    values = tensorboard_values(run) if logger == "tensorboard" else mlflow_values(run)
    assert "train/loss" in {name.removesuffix("_epoch") for name in values}


def tensorboard_values(run: Path) -> set[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return set(events.Tags()["scalars"])


def mlflow_values(run: Path) -> set[str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run / "mlflow").as_uri())
    there = client.get_experiment_by_name("sparsepipe")
    (found,) = client.search_runs([there.experiment_id])
    return set(found.data.metrics)


@pytest.mark.parametrize("logger", ["tensorboard", "mlflow"])
def test_a_logger_that_is_not_installed(job: Callable[..., Path], logger: str) -> None:
    if importlib.util.find_spec(logger) is not None:
        pytest.skip(f"{logger} is installed")
    with pytest.raises(ConfigError, match=rf"sparsepipe\[{logger}\]"):
        job(*SMALL, f"logger={logger}")


def test_search_by_optuna_composes() -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose(CONFIG_NAME, ["hparams_search=optuna"], return_hydra_config=True)
    assert config.objective == "val/accuracy"
    assert "OptunaSweeper" in config.hydra.sweeper._target_
    assert list(config.hydra.sweeper.params) == ["optim.optimizer.lr"]
