"""Ranks that die, stop or break a rule: which error they or their peers raise, and when."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
import torch

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.runtime.transport import Kind, Network
from tests.support.plans import plan_of
from tests.support.processes import outcomes, run
from tests.support.transport_cases import A, G, complaint, message
from tests.support.waiting import LONG_S, post_mark, stay, wait_for_marks


def made(rank: int, config: str) -> Network:
    """A network once every rank has its own: no connection breaks while it is made."""
    net = Network(plan_of(config), rank, timeout_s=LONG_S)
    post_mark(f"{rank} has made it")
    wait_for_marks(*(f"{other} has made it" for other in range(plan_of(config).num_ranks)))
    return net


def notice(net: Network) -> None:
    """Waits until a thread has found that a peer is gone."""
    deadline_s = time.monotonic() + LONG_S
    while net._fault is None and time.monotonic() < deadline_s:
        time.sleep(0.01)


def chain_rank(rank: int, ends: int, signum: int) -> None:
    """Three stages in turn; at minibatch 3 rank ``ends`` gets a signal from itself.

    If that stops it, waits that it keeps from being met have a limit of 2 s.
    """
    net = Network(plan_of("1-1-1"), rank, timeout_s=LONG_S)

    def take(kind: Kind, source: int) -> None:
        if (signum, m) == (signal.SIGSTOP, 3) and (source < rank) == (ends < rank):
            net._timeout_s = 2.0
        net.receive(kind, source, minibatch=m)

    for m in range(6):
        if m == 3:
            post_mark(f"{rank} is there")
        if rank == ends and m == 3:
            if signum == signal.SIGSTOP:
                wait_for_marks(*(f"{other} is there" for other in range(3)))
            os.kill(os.getpid(), signum)
        if rank > 0:
            take(A, rank - 1)
        if rank < 2:
            net.send(A, rank + 1, message(m, torch.zeros(200_000)))
            take(G, rank + 1)
        if rank > 0:
            net.send(G, rank - 1, message(m, [torch.zeros(200_000)]))
        net.release(m)
    net.close()


SOME_RANK = [
    pytest.param(0, marks=pytest.mark.full),
    1,
    pytest.param(2, marks=pytest.mark.full),
]
"""One between two others says most; the first and the last, in the full suite."""


def stopped_chain_rank(rank: int, stopped: int) -> None:
    """Nobody that has given up leaves before the other one has, too."""
    try:
        chain_rank(rank, stopped, signal.SIGSTOP)
    finally:
        post_mark(f"{rank} gives up")
        wait_for_marks(*(f"{other} gives up" for other in range(3) if other != stopped))


@pytest.mark.parametrize("dead", SOME_RANK)
def test_a_dead_rank_is_named_at_once(dead: int) -> None:
    found = outcomes(chain_rank, 3, dead, signal.SIGKILL)
    assert found[dead].exit_code == -signal.SIGKILL
    others = [outcome for outcome in found if outcome.rank != dead]
    said = [complaint(outcome) for outcome in others]
    assert any(f"rank {dead} (stage {dead}) is gone" in text for text in said)
    assert all(re.search("minibatch [23]", text) for text in said)  # 2's gradient may be queued
    assert all(f"rank {o.rank} (stage {o.rank})" in t for o, t in zip(others, said, strict=True))
    assert all(outcome.ended_s < 40 for outcome in others)  # not at the limit


@pytest.mark.parametrize("stopped", SOME_RANK)
def test_a_stopped_rank_is_named_at_the_limit(stopped: int) -> None:
    others = [rank for rank in range(3) if rank != stopped]
    found = outcomes(stopped_chain_rank, 3, stopped, awaited=others)
    for rank in others:
        # A rank names the one that it waits for itself, which may wait for the culprit.
        peer = 1 if rank != 1 else stopped
        kind = "gradient" if peer > rank else "activation"
        assert complaint(found[rank]) == (
            f"rank {peer} (stage {peer}) did not send the {kind} of minibatch 3 "
            f"to rank {rank} (stage {rank}) within 2 s"
        )
        assert found[rank].error.ranks == (peer,)
        assert 2 <= found[rank].ended_s < 40


def full_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S, queue_depth=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    net._timeout_s = 2.0
    for m in range(10):
        net.send(A, 1, message(m, torch.zeros(5_000_000)))


def test_a_sender_does_not_wait_for_room_beyond_the_limit() -> None:
    sender, _ = outcomes(full_rank, 2, awaited=[0])
    assert complaint(sender).startswith(
        "rank 1 (stage 1) took nothing from rank 0 (stage 0), so the activation of minibatch"
    )
    assert complaint(sender).endswith("could not be sent within 2 s")
    assert sender.ended_s < 40


def computing_rank(rank: int) -> str:
    """Rank 0 dies while the other computes, which notices in its next call."""
    net = made(rank, "1-1")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    notice(net)
    with pytest.raises(TransportError) as caught:
        net.send(G, 0, message(4))
    with pytest.raises(TransportError):
        net.receive(A, 0, minibatch=4)
    net.close()  # neither hangs nor hides the first error
    return caught.value.message


def test_a_computing_rank_notices_a_death_in_its_next_call() -> None:
    found = outcomes(computing_rank, 2, awaited=[1])[1]
    assert found.error is None, str(found)
    assert "rank 0 (stage 0) is gone" in found.value
    assert "minibatch 4" in found.value


def waits_elsewhere_rank(rank: int) -> None:
    """Rank 0 waits for rank 1, which is busy; rank 2 of the same stage as 1 dies."""
    net = made(rank, "1-2")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        stay()
    net.receive(G, 1, minibatch=0)


def test_any_peers_death_ends_a_wait_for_another() -> None:
    found = outcomes(waits_elsewhere_rank, 3, awaited=[0])[0]
    assert "rank 2 (stage 1) is gone" in complaint(found)
    assert "waiting for the gradient of minibatch 0" in complaint(found)
    assert found.ended_s < 40


def dies_before_rank(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    Network(plan_of("1-1"), rank, timeout_s=2.0)


def test_a_peer_that_never_connects() -> None:
    found = outcomes(dies_before_rank, 2, awaited=[0])[0]
    assert complaint(found) == (
        "rank 1 did not take part in setting up connections with rank 0 within 2 s"
    )
    assert "GLOO_SOCKET_IFNAME" in found.error.remedy
    assert found.ended_s < 40


def dies_closing_rank(rank: int) -> None:
    """Rank 1 dies where rank 0 closes already: then that is what ends its wait."""
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S)
    if rank == 1:
        with pytest.raises(TransportError):
            net.receive(A, 0, minibatch=0)
        os.kill(os.getpid(), signal.SIGKILL)
    net.close()


def dies_before_closing_rank(rank: int) -> None:
    net = made(rank, "1-1")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    notice(net)
    net.close()


@pytest.mark.parametrize("dies", [dies_closing_rank, dies_before_closing_rank])
def test_a_death_while_closing(dies: Callable[[int], None]) -> None:
    found = outcomes(dies, 2)[0]
    assert "rank 1 (stage 1) is gone" in complaint(found)
    assert "closing" in complaint(found)


def leaves_early_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S)
    if rank == 0:
        net.receive(G, 1, minibatch=2)
    net.close()


def test_a_peer_that_ends_in_order_but_too_early() -> None:
    found = outcomes(leaves_early_rank, 2)[0]
    assert complaint(found) == (
        "rank 1 (stage 1) ended before it sent the gradient of minibatch 2 to rank 0 (stage 0)"
    )


def overwrites_rank(rank: int) -> str:
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S, queue_depth=4)
    if rank == 0:
        x = torch.zeros(5_000_000)
        for m in range(3):
            net.send(A, 1, message(m, x))
        x.add_(1)  # what no sender may do
        post_mark("written")
        with pytest.raises(ConfigError) as caught:
            net.receive(G, 1, minibatch=0)
        return caught.value.message
    wait_for_marks("written")  # until then one message has come, and none is taken
    for m in range(2):
        net.receive(A, 0, minibatch=m)
    stay()
    return ""


def test_writing_to_what_was_sent_is_noticed() -> None:
    found = outcomes(overwrites_rank, 2, awaited=[0])[0]
    assert found.error is None, str(found)
    assert "the activation of minibatch" in found.value
    assert "for rank 1 (stage 1) was written to before it was sent" in found.value


def unsendable_rank(rank: int) -> bool:
    """A refused message does no harm: the next one goes through."""
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S)
    if rank == 0:
        with pytest.raises(ConfigError, match="activation of minibatch 0 holds"):
            net.send(A, 1, message(0, lambda: 3))
        net.send(A, 1, message(0, 3))
    else:
        assert net.receive(A, 0, minibatch=0).tree == 3
    net.close()
    return True


def test_a_refused_message_leaves_the_channel_whole() -> None:
    assert run(unsendable_rank, 2) == [True, True]
