"""Collectives that a rank does not take part in: which error the others raise, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore, TCPStore

from sparsepipe.errors import TransportError
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.process_group import make_stage_group
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.runtime.failures import missing_ranks
from sparsepipe.runtime.failures.missing_ranks import Wait, WaitBoard, collective, set_rank_names
from sparsepipe.runtime.transport import Kind, Network
from tests.support import patience
from tests.support.plans import plan_of
from tests.support.processes import outcomes, run
from tests.support.transport_cases import complaint
from tests.support.waiting import LONG_S, shorten_limit, stay, wait_for_note_of


def round_rank(rank: int, config: str, ends: int, when: str, signum: int, limit_s: float) -> None:
    """Replicas that average; one gets a signal from itself before or after they have met.

    The limit is that of the wait that is to end in vain, and not of what comes before.
    """
    dist.barrier()
    plan = plan_of(config)
    set_rank_names(lambda rank: f"rank {rank} (stage {plan.stage_of(rank)})")
    if rank == ends and when == "setup":
        os.kill(os.getpid(), signum)
    made = make_stage_group(
        [plan.ranks_of(0)], backend="gloo", timeout_s=limit_s if when == "setup" else LONG_S
    )

    def meets(here: str) -> None:
        if here == when:
            shorten_limit(limit_s, made)
            if rank == ends:
                os.kill(os.getpid(), signum)

    replicas = Replicas(made, {"a": nn.Parameter(torch.zeros(1000))})
    replicas.first = 10
    for number in range(3):
        meets("round" if number == 2 else "")
        replicas.average({"a": torch.ones(1000)})
    meets("drain")
    replicas.average_statistics_([torch.zeros(3)])


WHAT = {
    "setup": "setting up connections",
    "round": "averaging the gradients of minibatches 14 to 15",
    "drain": "averaging statistics at a drain",
}


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("setup", marks=pytest.mark.full),
        "round",
        pytest.param("drain", marks=pytest.mark.full),
    ],
)
def test_a_stopped_replica_is_named_at_the_limit(when: str) -> None:
    found = outcomes(round_rank, 2, "2", 1, when, signal.SIGSTOP, 4.0, awaited=[0])[0]
    assert complaint(found) == (
        f"rank 1 (stage 0) did not take part in {WHAT[when]} with rank 0 (stage 0) within 4 s"
    )
    assert found.ended_s < 40


@pytest.mark.parametrize("when", ["round", "drain"])
def test_a_killed_replica_is_named_at_once(when: str) -> None:
    found = outcomes(round_rank, 2, "2", 0, when, signal.SIGKILL, LONG_S)[1]
    assert complaint(found) == (
        "rank 0 (stage 0) is gone: its connection to rank 1 (stage 0) broke during " + WHAT[when]
    )
    assert found.ended_s < 40


def hurried_rank(rank: int) -> None:
    """With the limits that users' ranks have for words with the store."""
    patience.restore_limits()
    round_rank(rank, "2", 0, "round", signal.SIGKILL, LONG_S)


def test_a_killed_replica_is_named_within_the_products_own_limits() -> None:
    found = outcomes(hurried_rank, 2)[1]
    text = complaint(found)
    assert text.endswith("during " + WHAT["round"])
    if not text.startswith(
        "rank 0 (stage 0) is gone: "
    ):  # right where the machine is so busy that the store does not answer within 5 s
        assert text.startswith("rank 1 (stage 0) is cut off from all others, ")
        assert found.ended_s >= 5
    assert found.ended_s < 40


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_of_several_replicas_the_missing_one_is_named(signum: int) -> None:
    """All connections break with the first, and with those of the first rank to give up."""
    others = [0, 2]
    arguments = ("3", 1, "round", signum, LONG_S if signum == signal.SIGKILL else 3.0)
    found = outcomes(round_rank, 3, *arguments, awaited=others)
    for rank in others:
        assert complaint(found[rank]).startswith("rank 1 (stage 0) ")
        assert found[rank].ended_s < 40  # the killed one is missed at once, not at the limit


def behind_rank(rank: int) -> None:
    """Rank 0 waits for rank 1, its replica, which waits for a message of rank 2."""
    plan = plan_of("2-1")
    made = make_stage_group([plan.ranks_of(0)], backend="gloo", timeout_s=LONG_S)
    network = Network(plan, rank, timeout_s=LONG_S)
    replicas = Replicas(made, {"a": nn.Parameter(torch.zeros(10))})
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1:
        network._timeout_s = 3.0
        with pytest.raises(TransportError):
            network.receive(Kind.GRADIENT, 2, minibatch=1)
        stay()
    wait_for_note_of(1)
    shorten_limit(2.0, made)
    replicas.average({"a": torch.ones(10)})


def test_a_replica_that_waits_itself_is_not_blamed() -> None:
    found = outcomes(behind_rank, 3, awaited=[0])[0]
    assert "rank 2 did not send the gradient of minibatch 1 to rank 1" in complaint(found)


def ahead_rank(rank: int) -> None:
    """Rank 2 waits for a message of rank 0, which waits for its replica, rank 1."""
    plan = plan_of("2-1")
    made = make_stage_group([plan.ranks_of(0)], backend="gloo", timeout_s=LONG_S)
    network = Network(plan, rank, timeout_s=LONG_S)
    replicas = Replicas(made, {"a": nn.Parameter(torch.zeros(10))})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2:
        wait_for_note_of(0)
        network._timeout_s = 2.0
        network.receive(Kind.ACTIVATION, 0, minibatch=2)
    shorten_limit(3.0, made)
    with pytest.raises(TransportError):
        replicas.average({"a": torch.ones(10)})
    stay()


def test_a_peer_that_waits_for_its_replica_is_not_blamed() -> None:
    found = outcomes(ahead_rank, 3, awaited=[2])[2]
    text = complaint(found)
    assert text.startswith("rank 1 (stage 0) did not take part in averaging the gradients")


def connecting_rank(rank: int) -> None:
    if rank == 1:
        stay()
    with collective("a test"):
        dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=1))


def test_a_timeout_of_the_store_is_not_reported_as_a_broken_connection() -> None:
    """Groups are made at it, with a limit of its own and other words."""
    found = outcomes(connecting_rank, 2, awaited=[0])[0]
    assert complaint(found).startswith("rank 1 did not take part in a test with rank 0")


def mistaken_rank(rank: int) -> str:
    with pytest.raises(RuntimeError, match="my socket timed out") as caught, collective("a test"):
        raise RuntimeError("my socket timed out")
    return type(caught.value).__name__


def test_errors_of_user_code_stay_as_they_are() -> None:
    assert run(mistaken_rank, 1) == ["RuntimeError"]


def slow_rank(rank: int) -> bytes:
    """A wait of more than half the limit that is met."""
    made = make_stage_group([[0, 1]], backend="gloo", timeout_s=LONG_S)
    if rank == 0:
        shorten_limit(2.0, made)  # so that rank 0 soon says that it waits
        with collective("a test", made):
            shorten_limit(LONG_S, made)
            dist.barrier(made)
    else:
        wait_for_note_of(0)
        dist.barrier(made)
    process_group.gather_objects(rank)
    return process_group.store().get("sparsepipe/waits/0")


def test_a_long_wait_that_is_met_is_taken_back() -> None:
    assert run(slow_rank, 2) == [b"", b""]


STORE_KEEPER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that keeps a store, and prints its port."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    command = [sys.executable, "-c", STORE_KEEPER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=True
    )
    yield process
    process.kill()
    process.communicate()


def store_of(launcher: subprocess.Popen[str]) -> TCPStore:
    assert launcher.stdout is not None
    return TCPStore("127.0.0.1", int(launcher.stdout.readline()), is_master=False)


def test_a_busy_launcher_is_not_reported_as_gone(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than other words with the store may take: a rank would blame itself."""
    assert missing_ranks._ANSWER_S > 2 * missing_ranks._STORE_LIMIT_S
    monkeypatch.setattr(
        missing_ranks, "_ANSWER_S", 60.0
    )  # however late this test gets to its next line
    board = WaitBoard(store_of(launcher))
    os.kill(launcher.pid, signal.SIGSTOP)
    goes_on = threading.Timer(
        2 * missing_ranks._STORE_LIMIT_S, launcher.send_signal, [signal.SIGCONT]
    )
    goes_on.start()
    assert not board.cut_off()
    goes_on.join()


def test_a_launcher_that_is_gone_is_known_at_once(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_ranks, "_ANSWER_S", 600.0)
    board = WaitBoard(store_of(launcher))
    assert not board.cut_off()
    launcher.kill()
    launcher.wait()
    started_s = time.monotonic()
    assert board.cut_off()
    assert time.monotonic() - started_s < 60


def wait_of(waiter: int, peer: int) -> Wait:
    return Wait(waiter=waiter, among=(peer,), what="the activation of minibatch 3")


def held_up_by(board: WaitBoard, waiter: int, peer: int) -> tuple[int, ...]:
    """Who waits for whom at the end of the chain that a wait in vain leads to."""
    wait = wait_of(waiter, peer)
    board.note(wait)
    last, missing = board.holding_up(wait)
    assert missing == last.among
    return (last.waiter, *missing)


def test_waits_lead_to_the_rank_that_does_not_wait() -> None:
    board = WaitBoard(HashStore())
    assert held_up_by(board, 1, 0) == (1, 0)
    assert held_up_by(board, 2, 1) == (1, 0)
    assert held_up_by(board, 3, 2) == (1, 0)
    assert held_up_by(board, 0, 3) == (1, 0)  # a circle


def test_a_wait_is_noted_at_half_its_limit_and_the_note_removed_when_it_ends() -> None:
    store = HashStore()
    board = WaitBoard(store)
    with board.noting(wait_of(1, 0), limit_s=0.2):
        while not store.check(["sparsepipe/waits/1"]):
            time.sleep(0.01)
        assert store.get("sparsepipe/waits/1")
    assert store.get("sparsepipe/waits/1") == b""
    assert held_up_by(board, 2, 1) == (2, 1)


def test_a_wait_that_is_met_in_time_needs_no_store() -> None:
    with WaitBoard(None).noting(wait_of(1, 0), limit_s=2.0):
        pass


class Hanging:
    """A store on a rank that stands still."""

    def set(self, key: str, value: str) -> None:
        time.sleep(30)

    def check(self, keys: list[str]) -> bool:
        time.sleep(30)
        return False


def test_a_store_that_does_not_answer_delays_no_rank() -> None:
    started_s = time.monotonic()
    assert held_up_by(WaitBoard(Hanging()), 1, 0) == (1, 0)
    assert time.monotonic() - started_s < 20
