"""Tasks that run out of memory end with an error that names the remedy, however they are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experiment_harness import Shell, composed

from sparsepipe.errors import HardwareError
from sparsepipe.experiment import out_of_memory
from sparsepipe.experiment.build import build_inventory
from sparsepipe.experiment.run import Run
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.experiment.signals import SignalWatch
from sparsepipe.experiment.sweep.record import records_of

GREEDY = ("model._target_=tinyfaults.greedy", "hardware.accelerator=cpu", "hardware.cpu_devices=2")
DP = ("parallel=dp", "parallel.devices=2")
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11 GiB"
ALLOCATOR = "can't allocate memory: you tried to allocate 1125899906842624 bytes"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    def make(*overrides: str) -> Run:
        config = composed("experiment=tiny", *GREEDY, *overrides)
        return Run(
            config=config,
            directory=RunDir(tmp_path),
            inventory=build_inventory(config),
            watch=SignalWatch(),
        )

    return make


def in_worker() -> MemoryError:
    """As torch brings an error of a loader's process."""
    first = "Caught MemoryError in DataLoader worker process 0."
    trace = 'Traceback (most recent call last):\n  File "own.py", line 1, in __getitem__'
    return MemoryError(f"{first}\n{trace}\nMemoryError: 8")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA), CUDA),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "CUDA error: CUBLAS_STATUS_"),
        (MemoryError(), "MemoryError"),
        (in_worker(), "MemoryError: 8"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("somebody's own mistake"), None),
        # Which tells a remedy already.
        (HardwareError("a link is out of memory", remedy="mend it"), None),
    ],
)
def test_what_is_told_of_an_error(
    error: Exception, said: str | None, run: Callable[..., Run]
) -> None:
    one = run()
    told = out_of_memory.told(error, one)
    assert (told is None) == (said is None)
    if told is not None:
        name = one.places[0].name
        assert told.message.startswith(f"{name} ran out of memory with data.batch_size=4: {said}")
        assert "\n" not in told.message
        assert "task=fit_batch" in told.remedy


def test_it_says_what_was_done_and_by_whom(run: Callable[..., Run]) -> None:
    error = torch.OutOfMemoryError(CUDA)
    error.add_note("rank 0, stage 0: forward of minibatch 3")
    told = out_of_memory.told(error, run(*DP))
    assert told is not None
    assert " (rank 0, stage 0: forward of minibatch 3) ran out of memory" in told.message
    told = out_of_memory.told(error, run())
    assert told is not None
    assert " (stage 0: forward of minibatch 3) ran out of memory" in told.message


def test_a_training_that_runs_out_of_it(job: Callable[..., Path]) -> None:
    with pytest.raises(HardwareError) as error:
        job(*GREEDY)
    message = error.value.message
    assert " (train epoch 1, batch 1) ran out of memory with data.batch_size=4: " in message
    assert ALLOCATOR in message
    assert isinstance(error.value.__cause__, RuntimeError), "with its traceback"


@pytest.mark.full
@pytest.mark.usefixtures("networks_for_ranks")
def test_ranks_that_run_out_of_it(job: Callable[..., Path]) -> None:
    """They are not begun again: they would run out of it again."""
    with pytest.raises(HardwareError) as error:
        job(*GREEDY, *DP, "parallel.max_restarts=1")
    assert "(rank " in error.value.message
    assert ALLOCATOR in error.value.message
    assert "Traceback" not in error.value.message


@pytest.mark.full
def test_a_job_of_a_sweep_that_runs_out_of_it(shell: Shell) -> None:
    swept = shell.sweep("hydra/launcher=sparsepipe", *GREEDY)
    assert swept.code == HardwareError.exit_code, swept.err
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    (record,) = records_of(sweep)
    assert " ran out of memory with data.batch_size=4: " in (record.error or "")
    assert "\n  remedy: take smaller batches (data.batch_size): `sparsepipe task=fit_batch" in (
        record.error or ""
    )
    assert "Traceback" not in swept.err
