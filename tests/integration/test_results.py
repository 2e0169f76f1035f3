"""What result.json tells of every run: when, on what, how large, how fast, from which commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sparsepipe
from sparsepipe.config.compose import config_dir
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.ledger_table import ALWAYS, OF_TASKS
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.tasks import train as training
from sparsepipe.tasks.result import strategy_name
from sparsepipe.utils.files import read_json, write_json
from sparsepipe.utils.host import usable_cores
from tests.support.command_line import Shell, composed, fault
from tests.support.resolved import run_directory

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

    forwards, read = [], []

    def batches() -> Any:
        for number in range(100):
            read.append(number)
            yield {"input": torch.zeros(evaluate._PREPARED_BYTES // 8)}

    class Slow(nn.Module):
        device = torch.device("cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forwards.append(x)
            return x

        def transfer_batch_to_device(self, batch: Any, device: Any, number: int) -> Any:
            return batch

    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        precision_plugin=SimpleNamespace(predict_step_context=torch.no_grad),
    )
    data = SimpleNamespace(test_dataloader=batches)
    assert evaluate.inference_rate(trainer, Slow(), data, warmup=2, timed=50, most_s=0.0) > 0
    assert len(forwards) == 3
    assert len(read) == 3, "as many as there is room for, and one more"
    assert training._FORWARDS["most_s"] <= 60


PAPER = ("model=sparse_vgg16_bn", "hardware=paper_5gpu")
TASKS = {
    "train": ("trainer.max_epochs=1",),
    "profile": ("task.num_warmup=0", "task.num_measured=1"),
    "partition": (*PAPER, "task.bandwidth_bytes_per_s=60e6"),
    "simulate": (
        *PAPER, "parallel=hete_mp", "parallel.search.bandwidth_bytes_per_s=60e6",
        "task.minibatches=8", "task.timeline_minibatches=2",
    ),
    "paper/table1": ("task.matrix_size=64", "task.copy_bytes=65536", "task.repeats=2"),
    "fit_batch": ("task.budget_bytes=1e9", "task.most=2", "task.start=2"),
    "train_if_fits": ("task.budget_bytes=1e9", "trainer.max_epochs=1"),
}  # fmt: skip
ELSEWHERE = {
    *("bandwidth", "clean", "compare", "emulate", "evaluate", "list", "measure_steps"),
    *("predict", "report", "paper/table3"),
}
"""Of several processes, of a checkpoint, of generated samples, without a result or a row, of long
searches."""
COLUMNS = {column.name: column for column in (*ALWAYS, *OF_TASKS)}


def check(run: Path) -> None:
    """Every key is a column that is known, one of ``/``, or a setting; and has its type."""
    result = read_json(run / "result.json")
    settings = RunSpec.load(RunDir(run).config).flat()
    unknown = {
        key
        for key in result
        if key not in COLUMNS and "/" not in key and not ("." in key and key in settings)
    }
    assert not unknown
    frame = load_results(run)
    for name in set(frame.columns) & set(COLUMNS):
        assert str(frame[name].dtype).partition("[")[0] == COLUMNS[name].dtype, name


def leave_answer(config: dict[str, object]) -> None:
    """What a probe has found, whose process need not be started then."""
    probe = {"batch_size": 2, "outcome": "fits", "memory_bytes": 1000, "wall_s": 1.0}
    batch = {**probe, "batch_size": 4}  # of the tiny experiment
    directory = run_directory(config)
    write_json(directory.path / "probes.json", [probe, batch])


def test_every_task_is_looked_at() -> None:
    place = config_dir() / "task"
    options = {str(path.relative_to(place).with_suffix("")) for path in place.rglob("*.yaml")}
    fig9 = {option for option in options if option.startswith("paper/fig9_")}
    assert options - fig9 == set(TASKS) | ELSEWHERE


@pytest.mark.parametrize("task", TASKS)
def test_result_keys_of_a_task_are_documented(task: str, job: Job) -> None:
    overrides = (f"task={task}", *TASKS[task])
    if task in ("fit_batch", "train_if_fits"):
        leave_answer(composed("experiment=tiny", *overrides))
    run = job(*overrides)
    check(run)
    if task == "train":
        check(job("task=evaluate", f"checkpoint={run}"))
        check(job(*overrides, f"checkpoint={run}"))


@pytest.mark.full
def test_result_keys_of_table_3_are_documented(job: Job) -> None:
    few = ("task.exact_bandwidths_bytes_per_s=[60e6]", "task.bandwidths_bytes_per_s=[60e6]")
    check(job("task=paper/table3", "hardware=paper_8gpu", *few))


ROOT = Path(sparsepipe.__file__).parents[1]
COMMITS = "callbacks={commits: {_target_: tests.support.tinysweep.Commits, checkout: %s}}"


@dataclass(frozen=True)
class FromCheckout(Shell):
    """The command as a checkout has it."""

    checkout: Path = Path()

    @property
    def environment(self) -> dict[str, str]:
        there = super().environment
        return {**there, "PYTHONPATH": f"{self.checkout}:{there['PYTHONPATH']}"}


def git(checkout: Path, *arguments: str) -> str:
    names = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    done = subprocess.run(
        ["git", *names, "-C", str(checkout), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the package and its configuration."""
    made = tmp_path / "checkout"
    for name in ("sparsepipe", "conf", "hydra_plugins"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    git(made.parent, "init", "--quiet", str(made))
    git(made, "add", "--all")
    git(made, "commit", "--quiet", "-m", "first")
    return made


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_committed_while_a_run_goes_on_is_not_its_commit(
    checkout: Path, tmp_path: Path, ranks: int
) -> None:
    before = git(checkout, "rev-parse", "HEAD")
    work = tmp_path / "work"
    work.mkdir()
    several = ("parallel=dp", f"parallel.devices={ranks}", "hardware=cores") if ranks > 1 else ()
    there = FromCheckout(work, before=(), checkout=checkout)
    done = there("trainer.max_epochs=1", COMMITS % checkout, *several)
    assert git(checkout, "rev-parse", "HEAD") != before, "the test has committed"
    assert read_json(done.run / "result.json")["git_commit"] == before
