"""Collectives that a rank does not take part in: which error the others raise, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore

from sparsepipe.runtime.collectives.process_group import make_stage_group
from sparsepipe.runtime.collectives.replicas import Replicas
from sparsepipe.runtime.failures import missing_ranks
from sparsepipe.runtime.failures.missing_ranks import collective, set_rank_names
from tests.support.plans import plan_of
from tests.support.processes import outcomes, run
from tests.support.transport_cases import complaint
from tests.support.waiting import LONG_S, shorten_limit


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


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_of_several_replicas_the_missing_one_is_named(signum: int) -> None:
    """All connections break with the first, and with those of the first rank to give up."""
    others = [0, 2]
    arguments = ("3", 1, "round", signum, LONG_S if signum == signal.SIGKILL else 3.0)
    found = outcomes(round_rank, 3, *arguments, awaited=others)
    for rank in others:
        assert complaint(found[rank]).startswith("rank 1 (stage 0) ")
        assert found[rank].ended_s < 40  # the killed one is missed at once, not at the limit


def mistaken_rank(rank: int) -> str:
    with pytest.raises(RuntimeError, match="my socket timed out") as caught, collective("a test"):
        raise RuntimeError("my socket timed out")
    return type(caught.value).__name__


def test_errors_of_user_code_stay_as_they_are() -> None:
    assert run(mistaken_rank, 1) == ["RuntimeError"]


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


@pytest.fixture
def kept(launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes its store the one at which this process has joined."""
    assert launcher.stdout is not None
    store = TCPStore("127.0.0.1", int(launcher.stdout.readline()), is_master=False)
    monkeypatch.setattr(missing_ranks, "store", lambda: store)


@pytest.mark.usefixtures("kept")
def test_a_busy_launcher_is_not_reported_as_gone(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than other words with the store may take: a rank would blame itself."""
    assert missing_ranks._ANSWER_S > 2 * missing_ranks._STORE_LIMIT_S
    monkeypatch.setattr(
        missing_ranks, "_ANSWER_S", 60.0
    )  # however late this test gets to its next line
    os.kill(launcher.pid, signal.SIGSTOP)
    goes_on = threading.Timer(
        2 * missing_ranks._STORE_LIMIT_S, launcher.send_signal, [signal.SIGCONT]
    )
    goes_on.start()
    assert not missing_ranks.is_cut_off()
    goes_on.join()


@pytest.mark.usefixtures("kept")
def test_a_launcher_that_is_gone_is_known_at_once(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_ranks, "_ANSWER_S", 600.0)
    assert not missing_ranks.is_cut_off()
    launcher.kill()
    launcher.wait()
    started_s = time.monotonic()
    assert missing_ranks.is_cut_off()
    assert time.monotonic() - started_s < 60
