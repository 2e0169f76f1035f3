"""What ``result.json`` tells of every run: when, on what, how large, how fast."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.ledger_table import ALWAYS
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.tasks import train as training
from sparsepipe.tasks.result import strategy_name
from sparsepipe.utils.files import read_json, write_json
from sparsepipe.utils.host import usable_cores
from tests.support.command_line import Shell, composed, fault

Job = Callable[..., Path]

ON_SOME = {"cuda", "git_commit", "peak_device_memory_bytes", "train_peak_device_memory_bytes"}
"""Columns of runs on a GPU, or from a checkout."""


def test_a_training_writes_all_columns_that_every_ledger_has(job: Job) -> None:
    before_s = time.time()
    run = job("task.monitor=val/accuracy")
    result, after_s = read_json(run / "result.json"), time.time()
    missing = {column.name for column in ALWAYS if result.get(column.name) is None}
    assert missing <= ON_SOME
    assert (result["model"], result["strategy"], result["starts"]) == ("mlp", "single", 1)
    began, ended = (datetime.fromisoformat(result[key]) for key in ("started_at", "finished_at"))
    assert before_s - 1 <= began.timestamp() <= ended.timestamp() <= after_s
    assert began.utcoffset() is not None
    assert 0 < result["train_time_s"] < result["wall_s"] < after_s - before_s
    assert result["epoch_time_s"] > 0
    # By hand: 8 * 8 + 8 and 8 * 2 + 2; the sizes are those of tests/support/tinyhouse.py.
    assert result["parameters"] == 90
    assert [result[f"{split}_shapes"] for split in ("train", "val", "test")] == [32, 8, 9]
    assert 0 <= result["train/accuracy"] <= 1
    assert result["test_shapes_per_s"] * result["test_time_s"] == pytest.approx(9)
    assert result["inference_shapes_per_s"] > 0
    assert 0 < result["train_peak_memory_bytes"] <= result["peak_memory_bytes"]
    assert result["hardware_hosts"] == 1
    assert result["hardware_memory_bytes"] > 2**27
    assert (result["machine_cores"], result["python"]) == (
        usable_cores(),
        platform.python_version(),
    )
    (row,) = load_results(run.parent).to_dict("records")
    assert row["inference_shapes_per_s"] == result["inference_shapes_per_s"]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["dp", "pipeline"])
def test_several_ranks_are_one_run(shell: Shell, strategy: str) -> None:
    """No shape counts twice; a network that is split can infer on no device alone."""
    split = ("parallel.plan.balance=layers",) if strategy == "pipeline" else ()
    run = shell(f"parallel={strategy}", "parallel.devices=2", "hardware=cores", *split).run
    result = read_json(run / "result.json")
    assert (result["strategy"], result["ranks"], result["parameters"]) == (strategy, 2, 90)
    assert [result[f"{name}_shapes"] for name in ("train", "val", "test")] == [32, 8, 9]
    assert result["test_shapes_per_s"] * result["test_time_s"] == pytest.approx(9)
    assert ("inference_shapes_per_s" in result) == (strategy == "dp")
    assert result["train_peak_memory_bytes"] > 0


def test_a_training_that_is_not_tested_does_not_infer(job: Job) -> None:
    result = read_json(job("task.test=false", "trainer.max_epochs=1") / "result.json")
    untold = {"test_shapes", "test_time_s", "test_shapes_per_s", "inference_shapes_per_s"}
    assert not untold & set(result)
    assert result["train_shapes"] == 32


def test_a_users_own_module_needs_no_optional_methods(job: Job) -> None:
    """Nobody knows what its ``forward`` takes."""
    result = read_json(job("model=own", "task.test=false", "data.val_size=0") / "result.json")
    assert result["model"] == "OwnModule"
    assert "inference_shapes_per_s" not in result


@pytest.mark.full
def test_a_killed_run_that_is_gone_on_with(shell: Shell) -> None:
    """It began when it was first begun; what it took before it was killed counts."""
    kill = fault([(8, 9)])
    first = shell(kill)
    assert first.code != 0
    (path,) = shell.runs()
    began_s, rest_s = RunDir(path).starts[0], time.time()
    assert began_s is not None
    assert began_s < rest_s
    result = read_json(shell(kill).run / "result.json")
    assert result["starts"] == 2
    assert datetime.fromisoformat(result["started_at"]).timestamp() == int(began_s)
    assert result["wall_s"] > rest_s - began_s


def test_the_memory_of_a_training_counts_where_only_its_test_is_done_again(job: Job) -> None:
    with pytest.raises(Stopped):
        job("callbacks={stop: {_target_: tests.support.tinyhouse.StopTest}}")
    (path,) = (item.parent for item in Path.cwd().glob("outputs/tiny/*/config.yaml"))
    fitted = RunDir(path).fitted
    kept = read_json(fitted)
    assert kept["train_peak_memory_bytes"] > 0
    write_json(fitted, {**kept, "train_peak_memory_bytes": 2**50})
    run = job("callbacks={stop: {_target_: tests.support.tinyhouse.StopTest}}")
    result = read_json(run / "result.json")
    assert (result["peak_memory_bytes"], result["starts"]) == (2**50, 2)
    assert result["train_shapes"] == 32
    assert result["callbacks.stop._target_"] == "tests.support.tinyhouse.StopTest"


def test_a_training_that_was_killed_after_its_last_epoch_counts_its_samples(job: Job) -> None:
    run = job()
    whole = read_json(run / "result.json")
    for path in (RunDir(run).fitted, run / "DONE.json", run / "result.json"):
        path.unlink()
    result = read_json(job() / "result.json")
    counts = ("steps", "train_shapes", "val_shapes", "test_shapes", "test/accuracy")
    assert [result[name] for name in counts] == [whole[name] for name in counts]
    assert result["val_shapes"] > 0


def test_a_run_that_an_older_version_began(tmp_path: Path) -> None:
    """When that was is not known; that it was gone on with is."""
    directory = RunDir(tmp_path / "tiny" / "0123")
    config = composed("experiment=tiny")
    assert directory.starts == ()
    directory.path.mkdir(parents=True)
    directory.config.write_text("name: tiny\n")
    directory.open(config)
    first, second = directory.starts
    assert first is None
    assert second == pytest.approx(time.time(), abs=60)
    directory.open(config.replace(force=True))
    (only,) = directory.starts
    assert only is not None
    directory.remove_if_unused()
    assert not directory.path.exists(), "it has nothing but how often it was begun"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (("parallel=single",), "single"),
        (("parallel=dp",), "dp"),
        (("parallel=pipeline",), "pipeline"),
        (("parallel=hete_mp",), "hete_mp"),
        (("parallel=exact",), "exact"),
        (("parallel=hete_mp", "parallel.plan.cuts=[2]"), "pipeline"),
        (("task=simulate", "parallel=mp"), "mp"),
        (("task=simulate", "parallel=dp"), "dp"),
    ],
)
def test_words_for_strategies(overrides: tuple[str, ...], name: str) -> None:
    config = composed(*overrides)
    if "task=simulate" in overrides:  # which itself is one process
        config = config.replace(parallel=composed("parallel=single").parallel)
    assert strategy_name(config) == name


def test_of_a_plan(job: Job) -> None:
    """It is told by its search, and the hardware is what it is for."""
    run = job("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")
    result = read_json(run / "result.json")
    assert (result["strategy"], result["kind"], result["ranks"]) == ("hete_mp", "simulated", 1)
    assert result["wall_s"] > 0
    assert result["hardware_devices"] == "1 x TITAN V, 4 x RTX 2080 Ti"
    assert result["hardware_hosts"] == 2
    assert result["hardware_memory_bytes"] == (12 + 4 * 11) * 10**9


def test_inference_stops_in_time() -> None:
    """One forward at least counts, however long it takes; large batches are few."""
    from sparsepipe.tasks import evaluate

    class Slow(nn.Module):
        forwards = 0
        device = torch.device("cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).forwards += 1
            return x

        def transfer_batch_to_device(self, batch: Any, device: Any, number: int) -> Any:
            return batch

    class Data:
        read = 0

        def test_dataloader(self) -> Any:
            for _ in range(100):
                type(self).read += 1
                yield {"input": torch.zeros(evaluate._PREPARED_BYTES // 8)}

    class Plain:
        root_device = torch.device("cpu")

    class Trainer:
        strategy = Plain()
        precision_plugin = type("P", (), {"predict_step_context": staticmethod(torch.no_grad)})()

    rate = evaluate.inference_rate(
        Trainer(),
        Slow(),
        Data(),
        warmup=2,
        timed=50,
        most_s=0.0,  # type: ignore[arg-type]
    )
    assert rate > 0
    assert Slow.forwards == 3
    assert Data.read == 3, "as many as there is room for, and one more"
    assert training._FORWARDS["most_s"] <= 60
