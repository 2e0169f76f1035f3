"""What users do wrong or unluckily and what they are told; groups that change how a run goes."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.cluster import Device, Host, Inventory
from sparsepipe.errors import ConfigError, OutputError
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, composed, fault, files_limited_to, rows
from tests.support.resolved import resolved

Job = Callable[..., Path]


MISTAKES = {
    "key": (["trainer.max_epoch=3"], 2, ["remedy: correct the key or value", "--cfg job"]),
    "option": (["model=mpl"], 2, ["remedy: `sparsepipe --help` lists groups and options"]),
    "devices": (
        ["parallel=dp", "parallel.devices=999", "hardware.accelerator=cpu"],
        4,
        ["999 devices are requested, but the inventory has", "remedy: set parallel.devices="],
    ),
    "outputs": (["paths.outputs=file"], 1, ["cannot be written", "set paths.outputs to another"]),
    "endless": (
        ["optim=adamw", "trainer.max_epochs=-1"],
        2,
        ["needs the training's length", "remedy: set trainer.max_epochs"],
    ),
}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        pytest.param(*mistake, id=name, marks=[] if name == "key" else [pytest.mark.full])
        for name, mistake in MISTAKES.items()
    ],
)
def test_command_line_names_the_remedy(
    shell: Shell, arguments: list[str], code: int, words: list[str]
) -> None:
    (shell.cwd / "file").touch()
    refused = shell(*arguments)
    assert refused.code == code
    for word in words:
        assert word in refused.err
    assert "Traceback" not in refused.err
    left = {path.suffix for path in shell.cwd.rglob("*") if path.is_file()}
    assert left <= {"", ".lock"}, "a refused run leaves nothing behind"


@pytest.mark.parametrize(
    "settings",
    [(), ("data.val_size=0",), ("trainer.check_val_every_n_epoch=2", "trainer.max_epochs=3")],
    ids=["validated", "nothing to validate", "validated later"],
)
def test_a_monitor_that_nobody_logs(job: Job, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        job("task.monitor=val/los", *settings)
    assert error.value.message.startswith("task.monitor=val/los is not logged; logged: ")
    logged = error.value.message.partition("; logged: ")[2].split(", ")
    assert {"train/loss", "train/accuracy"} <= set(logged)
    assert ("val/loss" in logged) == ("data.val_size=0" not in settings)
    assert not [name for name in logged if name.endswith(("_step", "_epoch"))]


def test_a_monitor_that_is_logged_every_other_epoch(job: Job) -> None:
    run = job("task.monitor=val/loss", "task.mode=min", "trainer.check_val_every_n_epoch=2")
    assert checkpoint(run, "best")["callbacks"]["RunCheckpoint"]["epoch"] == 2


def test_no_space_for_the_checkpoint_of_a_stop(job: Job) -> None:
    with files_limited_to(200_000), pytest.raises(OutputError) as error:
        job("model.width=20000", fault([(3, signal.SIGINT)]))
    assert error.value.message.startswith("stopped by SIGINT without a checkpoint: ")
    assert error.value.message.endswith("File too large; there is no checkpoint yet")
    assert "free space" in error.value.remedy
    assert "run the command again, without force=true" in error.value.remedy


@pytest.mark.full
def test_no_space_for_the_checkpoint_when_ranks_stop(shell: Shell) -> None:
    """One of them writes, the other waits for it; a stop and a full disk are no reason to retry."""
    ranks = ("parallel=dp", "parallel.devices=2", "hardware.accelerator=cpu")
    stop = fault([(1, signal.SIGINT)], parent=True)
    with files_limited_to(200_000):
        lost = shell(*ranks, "model.width=20000", "parallel.max_restarts=2", stop)
    assert lost.code == 1, lost.err
    assert "error: stopped by SIGINT without a checkpoint: " in lost.err
    assert "File too large; there is no checkpoint yet" in lost.err
    assert lost.err.count("remedy: free space") == 1
    assert "beginning again" not in lost.err
    assert "Traceback" not in lost.err


EARLY = (
    "callbacks={early: {_target_: pytorch_lightning.callbacks.EarlyStopping, "
    "monitor: val/loss, patience: 1, min_delta: 9.0}, "
    "kill: {_target_: tests.support.tinyhouse.StopTest}}"
)


def test_training_that_ended_early_is_not_taken_up_again(job: Job) -> None:
    settings = (EARLY, "trainer.max_epochs=9")
    with pytest.raises(Stopped):
        job(*settings)
    run = job(*settings)
    assert [row["epoch"] for row in rows(run)] == ["0", "1"]
    result = read_json(run / "result.json")
    assert (result["epochs"], result["steps"]) == (2, 16)
    assert result["best_monitored"] is not None
    assert result["test/accuracy"] >= 0


def test_stop_after_the_last_validation_of_an_epoch_keeps_its_values(job: Job) -> None:
    """Twelve steps an epoch, validation after the fifth and the tenth, which is the stop's."""
    settings = ("data.train_size=48", "trainer.val_check_interval=5", "optim.optimizer.lr=0.1")
    expected = job(*settings, "name=undisturbed")
    faulty = (*settings, fault([(21, signal.SIGINT)]))
    with pytest.raises(Stopped):
        job(*faulty)
    run = job(*faulty)
    for name in ("val/loss", "val/accuracy"):
        assert [row[name] for row in rows(run)] == [row[name] for row in rows(expected)]
    places = [checkpoint(path)["callbacks"]["RunCheckpoint"] for path in (run, expected)]
    assert places[0]["best"] == places[1]["best"]
    assert read_json(run / "result.json")["epochs"] == 2
    shapes = [float(row["train/shapes_per_s"]) * float(row["time/epoch_s"]) for row in rows(run)]
    assert shapes == pytest.approx([48, 48])


def test_an_interrupted_test_is_reported(job: Job) -> None:
    stop = "callbacks={kill: {_target_: tests.support.tinyhouse.StopTest}}"
    with pytest.raises(Stopped):
        job(stop)
    with pytest.raises(Stopped):
        job("task=evaluate", f"checkpoint={job()}", stop, "name=other")


def test_devices_of_several_nodes() -> None:
    cpus = Device(name="core", count=4, accelerator="cpu")
    inventory = Inventory(hosts=(Host(name="a", devices=(cpus,)),))
    config = composed("parallel=dp", "parallel.num_nodes=2")
    assert resolved(config, inventory).ranks == 8
    with pytest.raises(ConfigError, match="not a positive multiple"):
        resolved(composed("parallel=dp", "parallel.num_nodes=2", "parallel.devices=3"), inventory)


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
    with pytest.raises(ConfigError, match=f"{key} is val/accuracy, but there is") as refused:
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
