"""The tasks fit_batch and train_if_fits: real training steps in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.tasks import train
from sparsepipe.tasks.evaluate import inference_rate
from sparsepipe.tasks.fitting import prober
from sparsepipe.utils.files import read_json, write_json
from tests.support.command_line import Shell, composed, rows, wait_for
from tests.support.resolved import run_directory

pytestmark = pytest.mark.usefixtures("networks_for_ranks")
# A hidden layer of 2,000,000 features: a shape takes 8 MB in each activation. What the linear layer
# and the ReLU give is there at once, and in the backward their gradients, too; allocators add
# what they do not reuse. The parameters' 88 MB come again as gradients and as momentum.
WIDTH = 2_000_000
ACTIVATION_MB, LEAST_ACTIVATIONS, MOST_ACTIVATIONS = 8, 2, 6
WEIGHTS_MB, LEAST_WEIGHTS, MOST_WEIGHTS = 88, 3, 5
FIT = ("task=fit_batch", f"model.width={WIDTH}", "parallel=single")
BOTH = pytest.mark.parametrize("task", ["fit_batch", "train_if_fits"])


@pytest.fixture
def kept(workplace: Path) -> Callable[..., Path]:
    """A run's directory with answers in it, as a search leaves them that was ended."""

    def keep(answers: dict[int, int | None], *overrides: str) -> Path:
        config = composed("experiment=tiny", *overrides)
        directory = run_directory(config)
        probes = [
            {
                "batch_size": size,
                "outcome": "over_budget" if memory_bytes is None else "fits",
                "memory_bytes": memory_bytes,
                "wall_s": 1.0,
            }
            for size, memory_bytes in answers.items()
        ]
        write_json(directory.path / "probes.json", probes)
        return directory.path

    return keep


def test_a_search_whose_answers_are_all_there(kept, job, monkeypatch) -> None:
    answers = {size: 1000 * size if size <= 13 else None for size in range(1, 33)}
    path = kept(answers, *FIT, "task.budget_bytes=13500")
    monkeypatch.setattr(prober.Prober, "_ask", None)  # no process is to be started
    assert job(*FIT, "task.budget_bytes=13500") == path
    result = read_json(path / "result.json")
    assert (result["largest_batch"], result["refused_batch"]) == (13, 14)
    assert (result["limited_by"], result["step_memory_bytes"]) == ("over_budget", 13000)
    assert result["budget_bytes"] == 13500
    assert result["probed_batches"] == list(answers)
    assert result["probed_memory_bytes"] == list(answers.values())
    assert result["probed_outcomes"] == 13 * ["fits"] + 19 * ["over_budget"]
    assert result["probing_s"] == 32
    assert (result["kind"], result["task_name"]) == ("measured", "fit_batch")


@pytest.mark.parametrize(
    ("fitting", "more", "expected"),
    [
        (32, (), (32, None, "data", 32)),  # as many shapes as there are
        (32, ("task.most=20",), (20, None, "most", 20)),
        (0, (), (0, 1, "over_budget", None)),
        (13, ("task.precision=0.5",), (12, 16, "over_budget", 12)),
    ],
)
def test_what_limits_a_search(fitting: int, more, expected, kept, job) -> None:
    answers = {size: size if size <= fitting else None for size in range(1, 33)}
    overrides = (*FIT, "task.budget_bytes=1e9", *more)
    path = kept(answers, *overrides)
    job(*overrides)
    result = read_json(path / "result.json")
    found = [result[k] for k in ("largest_batch", "refused_batch", "limited_by")]
    assert (*found, result["step_memory_bytes"]) == expected


def test_a_training_that_does_not_fit_is_finished_and_says_so(kept, job) -> None:
    overrides = ("task=train_if_fits", "parallel=single", "task.budget_bytes=1e9")
    path = kept({4: None}, *overrides)
    assert job(*overrides) == path
    result = read_json(path / "result.json")
    assert (result["fits"], result["limited_by"]) == (False, "over_budget")
    assert (result["budget_bytes"], result["step_memory_bytes"]) == (1e9, None)
    assert "train/accuracy" not in result
    assert (path / "DONE.json").exists()
    assert not (path / "metrics.csv").exists()


def test_a_training_that_fits_measures_memory_and_inference_once(kept, job, monkeypatch) -> None:
    measured = []

    def noted(*trained: Any, **forwards: Any) -> float:
        measured.append(forwards)
        return inference_rate(*trained, **forwards)

    monkeypatch.setattr(train, "inference_rate", noted)
    forwards = ("task.warmup_batches=1", "task.timed_batches=3")
    overrides = ("task=train_if_fits", "parallel=single", "task.budget_bytes=1e9", *forwards)
    path = kept({4: 123}, *overrides)
    job(*overrides)
    assert measured == [{"warmup": 1, "timed": 3}]
    result = read_json(path / "result.json")
    assert (result["fits"], result["limited_by"], result["step_memory_bytes"]) == (True, None, 123)
    assert result["inference_shapes_per_s"] > 0
    assert result["train/accuracy"] == float(rows(path)[-1]["train/accuracy"])
    assert {"test/accuracy", "epoch_time_s"} <= set(result)


@BOTH
def test_what_is_refused_before_anything_is_measured(task: str, job) -> None:
    asked = (f"task={task}", "task.budget_bytes=1e9")
    with pytest.raises(ConfigError, match=f"task={task} runs as one process, but parallel"):
        job(*asked, "parallel=hete_mp")
    with pytest.raises(ConfigError, match=r"task\.steps' must be greater than or equal to 1"):
        job(*asked, "task.steps=0")
    with pytest.raises(ConfigError, match=r"budget_bytes' must be greater than or equal to 1"):
        job(*asked, "task.budget_bytes=0")


@pytest.mark.full
def test_the_largest_batch_of_real_steps_and_what_they_need(job) -> None:
    budget_mb = 560
    path = job(*FIT, f"task.budget_bytes={budget_mb}e6", "task.start=1")
    result = read_json(path / "result.json")
    largest = result["largest_batch"]
    room_mb = [budget_mb - count * WEIGHTS_MB for count in (MOST_WEIGHTS, LEAST_WEIGHTS)]
    assert room_mb[0] / (MOST_ACTIVATIONS * ACTIVATION_MB) <= largest
    assert largest <= room_mb[1] / (LEAST_ACTIVATIONS * ACTIVATION_MB)
    assert (result["limited_by"], result["refused_batch"]) == ("over_budget", largest + 1)
    assert 1e6 * LEAST_WEIGHTS * WEIGHTS_MB < result["step_memory_bytes"] <= 1e6 * budget_mb
    known = zip(result["probed_batches"], result["probed_memory_bytes"], strict=True)
    (small, few), *_, (large, many) = [pair for pair in known if pair[1] is not None]
    assert (small, large) == (1, largest)
    activations = (many - few) / (large - small) / (1e6 * ACTIVATION_MB)
    assert LEAST_ACTIVATIONS <= activations <= MOST_ACTIVATIONS


@pytest.mark.full
def test_a_killed_search_goes_on_and_leaves_no_process(shell: Shell) -> None:
    asked = (*FIT, "task.budget_bytes=1e9", "task.most=16")
    process = shell.start(*asked)
    wait_for(lambda: bool(list(shell.cwd.glob("outputs/*/*/probes.json"))))
    os.kill(process.pid, signal.SIGKILL)
    shell.wait(process)
    (file,) = shell.cwd.glob("outputs/*/*/probes.json")
    before = {each["batch_size"]: each for each in read_json(file)}
    finished = shell(*asked)
    assert finished.run == file.parent
    after = {each["batch_size"]: each for each in read_json(file)}
    assert set(before) < set(after) == {8, 16}
    assert all(after[size] == each for size, each in before.items()), "none is asked twice"
    assert read_json(finished.run / "result.json")["limited_by"] == "most"


@pytest.mark.full
def test_steps_that_fail_for_another_reason_raise_an_error(job) -> None:
    asked = ("task=fit_batch", "parallel=single", "task.budget_bytes=1e9")
    with pytest.raises(ConfigError, match="the optimizer refuses its settings"):
        job(*asked, "optim.optimizer.nesterov=true", "optim.optimizer.momentum=0")
    with pytest.raises(SparsePipeError, match=r"(?s)exit status 1, .*somebody's own mistake"):
        job(*asked, "model._target_=tests.support.tinyfaults.mistaken")


@pytest.mark.full
def test_steps_that_take_too_long_are_no_answer(shell: Shell) -> None:
    asked = (*FIT, "task.budget_bytes=1e9", "task.start=1", "task.most=1")
    slow = shell(*asked, "task.timeout_s=1")
    assert slow.code != 0
    assert "batch size 1 took longer than task.timeout_s=1" in slow.err
    assert "remedy: raise task.timeout_s" in slow.err
    assert not list(shell.cwd.glob("outputs/*/*/DONE.json"))
    assert not list(shell.cwd.glob("outputs/*/*/probes.json"))
    done = shell(*asked, "task.timeout_s=200")
    result = read_json(done.run / "result.json")
    assert (result["largest_batch"], result["limited_by"]) == (1, "most")


@BOTH
def test_trials_in_the_runs_own_process_are_for_gpus(job, task: str) -> None:
    with pytest.raises(ConfigError, match="would kill the run") as caught:
        job(f"task={task}", "parallel=single", "task.isolated=false")
    assert "task.isolated=true" in caught.value.remedy
