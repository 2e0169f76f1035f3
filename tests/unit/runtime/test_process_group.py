"""Joining, leaving and being restarted, with real ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparsepipe.errors import TransportError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.rank_reports import exit_immediately
from tests.support.processes import new_store, outcomes, run
from tests.support.waiting import LONG_S, held_port, post_mark, wait_for_marks


def total() -> int:
    value = torch.tensor([1 + dist.get_rank()])
    dist.all_reduce(value)
    return int(value)


def joins_thrice(rank: int) -> list[int]:
    found = []
    for _ in range(3):
        process_group.join("gloo", timeout_s=LONG_S)
        found.append(total())
        process_group.leave()
    return found


def test_a_rank_may_join_and_leave_again() -> None:
    assert run(joins_thrice, 3, join_group=False) == [[6, 6, 6]] * 3


def leaves_after_rank_0(rank: int, mark: str) -> bool:
    words = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    words.set(f"begun/{rank}", "1")
    with process_group.leader_first(of_host=False):
        if rank == 0:
            words.wait(["begun/1", "begun/2"])
            Path(mark).touch()
    return Path(mark).exists()


def test_rank_0_is_first_before_they_join(tmp_path: Path) -> None:
    found = run(leaves_after_rank_0, 3, str(tmp_path / "mark"), join_group=False)
    assert found == [True, True, True]


def joins_if_it_comes(rank: int, comes: tuple[int, ...], keeps: int | None) -> None:
    words = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    words.set(f"begun/{rank}", "1")
    words.wait([f"begun/{other}" for other in range(3)])
    _sign_together(words, rank, comes)
    if keeps is not None:  # no launcher keeps the store: rank 0 does
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(keeps)
    if rank in comes:
        process_group.join("gloo", timeout_s=2)
    else:
        time.sleep(60)


def _sign_together(words: dist.TCPStore, rank: int, comes: tuple[int, ...]) -> None:
    """Nobody's limit of 2 s begins before all of those that come have left word that they have."""
    join = dist.init_process_group

    def joining(*arguments: Any, **more: Any) -> None:
        words.set(f"signed/{rank}", "1")
        words.wait([f"signed/{other}" for other in comes])
        join(*arguments, **more)

    dist.init_process_group = joining


def complaints(comes: tuple[int, ...], keeps: int | None = None) -> list[TransportError]:
    """What those of three ranks say that come."""
    found = outcomes(
        joins_if_it_comes, 3, comes, keeps, join_group=False, awaited=comes, limit_s=40
    )
    errors = [found[rank].error for rank in comes]
    assert all(isinstance(error, TransportError) for error in errors), "\n".join(map(str, found))
    assert all("check whether all ranks have started" in error.remedy for error in errors)
    return errors


@pytest.mark.parametrize(
    "comes",
    [
        (0, 1),
        pytest.param((1, 2), marks=pytest.mark.full),
        pytest.param((1,), marks=pytest.mark.full),
    ],
)
def test_ranks_that_do_not_join_are_named(comes: tuple[int, ...]) -> None:
    absent = [rank for rank in range(3) if rank not in comes]
    for rank, error in zip(comes, complaints(comes), strict=True):
        who = " and ".join(f"rank {other}" for other in absent)
        assert error.message.startswith(f"{who} did not join rank {rank} within 2 s")


def test_without_a_launcher_all_join_at_rank_0() -> None:
    with held_port() as port:
        (error,) = complaints((1,), port)
    said = "rank 0, which keeps the store that all ranks join, did not answer rank 1"
    assert error.message.startswith(said)


def dies_once(rank: int) -> int:
    process_group.join("gloo", timeout_s=LONG_S)
    value = total()
    post_mark(f"{rank} has the sum")
    # A peer that ends in the middle of it would break it.
    wait_for_marks("0 has the sum", "1 has the sum")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_restarted_ranks_do_not_meet_the_dead() -> None:
    store = new_store()  # the agent's, which outlives its ranks
    for attempt in range(3):
        variables = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        found = outcomes(dies_once, 2, join_group=False, store=store, environment=variables)
        if attempt == 0:
            assert [o.exit_code for o in found] == [-signal.SIGKILL] * 2
        else:
            assert [o.value for o in found] == [3, 3], "\n".join(map(str, found))


def tells_once(rank: int) -> tuple[bool, bool]:
    with process_group.leader_first(of_host=True):
        pass
    process_group.join("gloo", timeout_s=LONG_S)
    first = not process_group.other_rank_failed(announced=True)
    found = first, not process_group.other_rank_failed(announced=True)
    dist.barrier()  # nobody ends while another still connects to it
    return found


def test_one_rank_of_each_attempt_reports_the_failure() -> None:
    store = new_store()
    for attempt in ("0", "1"):
        variables = {"TORCHELASTIC_RESTART_COUNT": attempt}
        found = run(tells_once, 2, join_group=False, store=store, environment=variables)
        assert sorted(first for first, _ in found) == [False, True]
        assert [second for _, second in found] == [False, False]


def comes_late(rank: int) -> bool:
    time.sleep(60 * (rank == 0))
    return process_group.first_to_report("a mistake")


def test_no_rank_waits_for_rank_0_to_report_an_error() -> None:
    found = outcomes(comes_late, 2, join_group=False, store=new_store(), awaited=[1], limit_s=30)
    assert found[1].value is True


def waits_in_vain_then_leaves(rank: int, told: str) -> None:
    if rank == 0:
        os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
        # A thread that gloo holds: nothing but the end of the process ends it.
        buffer = torch.zeros(1)
        threading.Thread(target=dist.recv, args=(buffer, 1), daemon=True).start()
        time.sleep(0.2)
        exit_immediately(TransportError("rank 1 is silent", remedy="look at it"))
    time.sleep(60)


def test_a_rank_with_blocked_threads_leaves_at_once(tmp_path: Path) -> None:
    found = outcomes(waits_in_vain_then_leaves, 2, str(tmp_path / "told"), awaited=[0], limit_s=30)
    assert found[0].exit_code == TransportError.exit_code
    assert found[0].ended_s < 20
    assert "rank 1 is silent\n  remedy: look at it" in (tmp_path / "told").read_text()
