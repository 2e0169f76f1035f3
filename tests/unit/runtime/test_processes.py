"""The harness that runs ranks: it must report failures and leave nobody behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import RankFailed, outcomes, run, run_shared


def total(rank: int, factor: int) -> int:
    value = torch.tensor([rank])
    dist.all_reduce(value)
    return factor * int(value)


def place(rank: int) -> tuple[int, float]:
    return os.getpid(), float(torch.rand(()))


def fails(rank: int) -> None:
    if rank:
        raise ValueError("rank 1 is at fault")
    dist.barrier()


def test_shared_ranks_serve_many_calls_and_start_anew_after_a_failure() -> None:
    first = run_shared(place, 2)
    assert run_shared(total, 2, 10) == [10, 10]
    assert run_shared(place, 2) == first  # the same processes, with the same seed
    with pytest.raises(RankFailed, match="rank 1 is at fault"):
        run_shared(fails, 2)
    for process, _ in first:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert run_shared(total, 2, 10) == [10, 10]


def one_raises(rank: int, directory: str) -> None:
    (Path(directory) / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        raise ValueError("rank 1 is at fault")
    time.sleep(60)


def test_the_first_failure_is_raised_and_no_process_is_left(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 is at fault") as caught:
        run(one_raises, 2, str(tmp_path))
    assert isinstance(caught.value.__cause__, ValueError)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def die_or_stop(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return "done"


def test_death_and_standstill_are_distinguished() -> None:
    found = outcomes(die_or_stop, 3, awaited=(0, 1), join_group=False, limit_s=30)
    assert [outcome.exit_code for outcome in found] == [0, -signal.SIGKILL, None]
    assert found[0].good
    assert found[0].value == "done"
