"""Tasks that run out of memory end with an error that names the remedy, however they are run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sparsepipe.errors import HardwareError, SparsePipeError
from sparsepipe.launch.execute import user_error
from sparsepipe.launch.prepare import resolve_run
from sparsepipe.runs import out_of_memory
from sparsepipe.runs.out_of_memory import counters, kills_since, oom_kills
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.launch import launch
from sparsepipe.sweep.record import records_of
from sparsepipe.tasks.task import ResolvedRun
from tests.support.command_line import Shell, composed

CPU = ("hardware.accelerator=cpu", "hardware.cpu_devices=2")
GREEDY = ("model._target_=tests.support.tinyfaults.greedy", *CPU)
DP = ("parallel=dp", "parallel.devices=2")
GPUS = "hardware=paper_8gpu"
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11 GiB"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"
ALLOCATOR = "can't allocate memory: you tried to allocate 1125899906842624 bytes"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., ResolvedRun]:
    def make(*overrides: str) -> ResolvedRun:
        run = resolve_run(composed("experiment=tiny", *overrides))
        return run.in_directory(RunDir(tmp_path))

    return make


def in_worker() -> MemoryError:
    """As torch brings an error of a loader's process."""
    first = "Caught MemoryError in DataLoader worker process 0."
    trace = 'Traceback (most recent call last):\n  File "own.py", line 1, in __getitem__'
    return MemoryError(f"{first}\n{trace}\nMemoryError: 8")


@pytest.mark.parametrize(
    ("error", "whose", "said"),
    [
        (torch.OutOfMemoryError(CUDA), "TITAN V", CUDA),
        (RuntimeError(CUBLAS), "TITAN V", CUBLAS),
        (RuntimeError(ALLOCATOR), "this machine", ALLOCATOR),
        (MemoryError(), "this machine", "MemoryError"),
        (in_worker(), "this machine", "MemoryError: 8"),
    ],
)
def test_the_message_of_an_error(
    error: Exception, whose: str, said: str, run: Callable[..., ResolvedRun]
) -> None:
    found = user_error(error, run(GPUS))
    assert isinstance(found, HardwareError)
    assert found.message == f"{whose} ran out of memory: {said}"
    assert "task=fit_batch" in found.remedy


class Dying(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index

    def __len__(self) -> int:
        return 1


def test_a_dead_loader_worker_needs_no_traceback(run: Callable[..., ResolvedRun]) -> None:
    with pytest.raises(RuntimeError) as dead:
        list(DataLoader(Dying(), num_workers=1, multiprocessing_context="fork"))
    for told in (str(dead.value), "DataLoader worker (pid 7) is killed by signal: Killed. "):
        found = user_error(RuntimeError(told), run(*CPU, *DP))
        assert found is not None
        assert (type(found), found.exit_code) == (SparsePipeError, 1)
        assert found.message.endswith(f"of rank 0 ended: {told.strip()}")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("somebody's own mistake"),
        HardwareError("a link is out of memory", remedy="mend it"),  # which tells one already
    ],
)
def test_other_errors_stay_as_they_are(error: Exception, run: Callable[..., ResolvedRun]) -> None:
    assert user_error(error, run(*CPU)) is None


@pytest.mark.parametrize(
    "overrides", [("task=emulate", GPUS), ("task=train", GPUS, "hardware.emulate=true")]
)
def test_an_emulated_device_is_not_said_to_be_short_of_memory(
    overrides: tuple[str, ...], run: Callable[..., ResolvedRun]
) -> None:
    found = user_error(RuntimeError(ALLOCATOR), run(*overrides))
    assert found is not None
    assert found.message.startswith("this machine")
    assert found.message.endswith(f" ran out of memory: {ALLOCATOR}")


def test_the_message_names_the_rank_and_the_operation(run: Callable[..., ResolvedRun]) -> None:
    error = MemoryError()
    error.add_note("rank 0, stage 0: forward of minibatch 3")
    found = user_error(error, run(*CPU, *DP))
    assert found is not None
    assert " (rank 0, stage 0: forward of minibatch 3) ran out of memory" in found.message
    found = user_error(error, run(*CPU))
    assert found is not None
    assert " (stage 0: forward of minibatch 3) ran out of memory" in found.message


def test_a_training_that_runs_out_of_it(job: Callable[..., Path]) -> None:
    with pytest.raises(HardwareError) as error:
        job(*GREEDY)
    message = error.value.message
    assert " (train epoch 1, batch 1) ran out of memory: " in message
    assert ALLOCATOR in message
    assert isinstance(error.value.__cause__, RuntimeError), "with its traceback"


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_ranks_that_run_out_of_it(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not begun again: they would run out of it again."""
    started = []

    def counted(*command: Any, **settings: Any) -> None:
        started.append(command)
        launch(*command, **settings)

    monkeypatch.setattr("sparsepipe.launch.job.launch", counted)
    with pytest.raises(HardwareError) as error:
        job(*GREEDY, *DP, "parallel.max_restarts=1")
    assert len(started) == 1
    assert "(rank " in error.value.message
    assert ALLOCATOR in error.value.message
    assert "Traceback" not in error.value.message


@pytest.mark.full
def test_a_job_of_a_sweep_that_runs_out_of_it(shell: Shell) -> None:
    swept = shell.sweep("hydra/launcher=sparsepipe", *GREEDY)
    assert swept.code == HardwareError.exit_code, swept.err
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    (record,) = records_of(sweep)
    assert " ran out of memory: " in (record.error or "")
    assert "\n  remedy: use smaller batches (data.batch_size; `sparsepipe task=fit_batch" in (
        record.error or ""
    )
    assert "Traceback" not in swept.err


def test_where_the_kernel_counts() -> None:
    v1 = "9:name=systemd:/\n4:memory:/box/a\n1:cpu:/\n"
    assert counters(v1) == [
        Path("/sys/fs/cgroup/memory/box/a/memory.oom_control"),
        Path("/sys/fs/cgroup/memory/box/memory.oom_control"),
        Path("/sys/fs/cgroup/memory/memory.oom_control"),
    ]
    v2 = "0::/user.slice/job:1\n"
    assert counters(v2) == [
        Path("/sys/fs/cgroup/user.slice/job:1/memory.events"),
        Path("/sys/fs/cgroup/user.slice/memory.events"),
        Path("/sys/fs/cgroup/memory.events"),
    ]
    assert counters("0::/\n") == [Path("/sys/fs/cgroup/memory.events")]


def test_what_it_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "memory.events"
    monkeypatch.setattr(out_of_memory, "counters", lambda: [file])
    for text in (
        "low 0\noom 1\noom_kill 2\noom_group_kill 0\n",
        "oom_kill_disable 0\noom_kill 2\n",
    ):
        file.write_text(text)
        assert (oom_kills(), kills_since(None), kills_since(1)) == (2, None, 1)
