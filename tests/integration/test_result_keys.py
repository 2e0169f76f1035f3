"""Results of real runs of each task hold what the document on results says, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.config.compose import config_dir
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.ledger_table import ALWAYS, OF_TASKS
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import read_json, write_json
from tests.support.command_line import composed
from tests.support.resolved import run_directory

Job = Callable[..., Path]

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
