"""Ranks that die, stop, or break a rule: who is told, what, and when."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plans import plan_of
from processes import Outcome, outcomes, run

from sparsepipe.errors import ConfigError, TransportError
from sparsepipe.runtime import group
from sparsepipe.runtime.transport import Kind, Message, Network

A, G, B = Kind.ACTIVATION, Kind.GRADIENT, Kind.BATCH
LONG_S = 60.0  # a limit that no good test reaches


def message(minibatch: int, tree: Any = None) -> Message:
    return Message(minibatch=minibatch, tree=tree)


def chain_rank(rank: int, ends: int, signum: int, timeout_s: float) -> None:
    """Three stages in turn; at minibatch 3 rank ``ends`` gets a signal from itself."""
    net = Network(plan_of("1-1-1"), rank, timeout_s=timeout_s)
    for m in range(6):
        if rank == ends and m == 3:
            os.kill(os.getpid(), signum)
        if rank > 0:
            net.receive(A, rank - 1, minibatch=m)
        if rank < 2:
            net.send(A, rank + 1, message(m, torch.zeros(200_000)))
            net.receive(G, rank + 1, minibatch=m)
        if rank > 0:
            net.send(G, rank - 1, message(m, [torch.zeros(200_000)]))
        net.release(m)
    net.close()


def complaint(outcome: Outcome) -> str:
    assert isinstance(outcome.error, TransportError), str(outcome)
    assert outcome.error.remedy
    return outcome.error.message


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_dead_rank_is_named_at_once(dead: int) -> None:
    found = outcomes(chain_rank, 3, dead, signal.SIGKILL, LONG_S, limit_s=50)
    assert found[dead].exit_code == -signal.SIGKILL
    others = [outcome for outcome in found if outcome.rank != dead]
    said = [complaint(outcome) for outcome in others]
    assert any(f"rank {dead} (stage {dead}) is gone" in text for text in said)
    assert all(re.search("minibatch [23]", text) for text in said)  # 2's gradient may be queued
    assert all(f"rank {o.rank} (stage {o.rank})" in t for o, t in zip(others, said, strict=True))
    assert all(outcome.ended_s < 30 for outcome in others)  # not at the limit


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stopped_rank_is_named_at_the_limit(stopped: int) -> None:
    others = [rank for rank in range(3) if rank != stopped]
    found = outcomes(chain_rank, 3, stopped, signal.SIGSTOP, 3.0, awaited=others, limit_s=50)
    first = min((found[rank] for rank in others), key=lambda outcome: outcome.ended_s)
    text = complaint(first)
    # Whoever gives up first may be waiting for a rank that itself waits for the culprit.
    assert re.match(
        rf"rank {stopped} \(stage {stopped}\) did not send the \w+ of minibatch [23]", text
    )
    assert f"rank {first.rank} (stage {first.rank})" in text
    assert "3 s" in text
    assert all(3 <= found[rank].ended_s < 20 for rank in others)


def circle_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=2.0)
    net.receive(A if rank else G, 1 - rank, minibatch=0)


def test_ranks_that_wait_for_each_other_end_too() -> None:
    found = outcomes(circle_rank, 2, limit_s=30)
    assert all("minibatch 0" in complaint(outcome) for outcome in found)


def slow_rank(rank: int) -> bool:
    """A wait that is met after more than half of its limit."""
    net = Network(plan_of("1-1"), rank, timeout_s=4.0)
    for m in range(2):
        if rank == 0:
            time.sleep(2.5)
            net.send(A, 1, message(m))
        else:
            net.receive(A, 0, minibatch=m)
    found = group.store().get("sparsepipe/waits/1") if rank == 1 else b""
    net.close()
    return found == b""


def test_a_long_wait_that_is_met_is_no_fault() -> None:
    assert run(slow_rank, 2) == [True, True]


def full_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=2.0, queue_depth=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    for m in range(10):
        net.send(A, 1, message(m, torch.zeros(5_000_000)))


def test_a_sender_does_not_wait_for_room_beyond_the_limit() -> None:
    sender, _ = outcomes(full_rank, 2, awaited=[0], limit_s=40)
    assert complaint(sender).startswith(
        "rank 1 (stage 1) took nothing from rank 0 (stage 0), so the activation of minibatch"
    )
    assert complaint(sender).endswith("could not be sent within 2 s")
    assert sender.ended_s < 20


def computing_rank(rank: int, victim: int) -> str:
    """The victim dies while the other computes; that one hears of it in its next call."""
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while net._fault is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    with pytest.raises(TransportError) as caught:
        net.send(A if rank == 0 else G, victim, message(4))
    with pytest.raises(TransportError):
        net.receive(G if rank == 0 else A, victim, minibatch=4)
    net.close()  # neither hangs nor hides what was told
    return caught.value.message


@pytest.mark.parametrize("victim", [0, 1])
def test_a_computing_rank_hears_of_a_death_in_its_next_call(victim: int) -> None:
    other = 1 - victim
    found = outcomes(computing_rank, 2, victim, awaited=[other], limit_s=40)[other]
    assert found.error is None, str(found)
    assert f"rank {victim} (stage {victim}) is gone" in found.value
    assert "minibatch 4" in found.value


def waits_elsewhere_rank(rank: int) -> None:
    """Rank 0 waits for rank 1, which is busy; rank 2 of the same stage as 1 dies."""
    net = Network(plan_of("1-2"), rank, timeout_s=LONG_S)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(40)
    net.receive(G, 1, minibatch=0)


def test_any_peers_death_ends_a_wait_for_another() -> None:
    found = outcomes(waits_elsewhere_rank, 3, awaited=[0], limit_s=45)[0]
    assert "rank 2 (stage 1) is gone" in complaint(found)
    assert "waiting for the gradient of minibatch 0" in complaint(found)
    assert found.ended_s < 30


def dies_before_rank(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    Network(plan_of("1-1"), rank, timeout_s=2.0)


def test_a_peer_that_never_connects() -> None:
    found = outcomes(dies_before_rank, 2, awaited=[0], limit_s=40)[0]
    assert complaint(found) == (
        "rank 1 did not take part in setting up connections with rank 0 within 2 s"
    )
    assert "GLOO_SOCKET_IFNAME" in found.error.remedy


def dies_closing_rank(rank: int) -> None:
    """Rank 1 dies where rank 0 closes already: then that is what ends its wait."""
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S)
    if rank == 1:
        with pytest.raises(TransportError):
            net.receive(A, 0, minibatch=0)
        os.kill(os.getpid(), signal.SIGKILL)
    net.close()


def dies_before_closing_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=LONG_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while net._fault is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    net.close()


@pytest.mark.parametrize("dies", [dies_closing_rank, dies_before_closing_rank])
def test_a_death_while_closing(dies: Callable[[int], None]) -> None:
    found = outcomes(dies, 2, limit_s=40)[0]
    assert "rank 1 (stage 1) is gone" in complaint(found)
    assert "closing" in complaint(found)


def lingers_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=2.0)
    if rank == 1:
        time.sleep(30)
    net.close()


def test_a_peer_that_does_not_close() -> None:
    found = outcomes(lingers_rank, 2, awaited=[0], limit_s=25)[0]
    assert "rank 1 (stage 1) did not end its connection to rank 0 (stage 0)" in complaint(found)


def leaves_early_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=5.0)
    if rank == 0:
        net.receive(G, 1, minibatch=2)
    net.close()


def test_a_peer_that_ends_in_order_but_too_early() -> None:
    found = outcomes(leaves_early_rank, 2, limit_s=30)[0]
    assert complaint(found) == (
        "rank 1 (stage 1) ended before it sent the gradient of minibatch 2 to rank 0 (stage 0)"
    )


def overwrites_rank(rank: int) -> str:
    net = Network(plan_of("1-1"), rank, timeout_s=5.0, queue_depth=4)
    if rank == 0:
        x = torch.zeros(5_000_000)
        for m in range(3):
            net.send(A, 1, message(m, x))
        x.add_(1)  # what no sender may do
        group.store().set("written", "1")
        with pytest.raises(ConfigError) as caught:
            net.receive(G, 1, minibatch=0)
        return caught.value.message
    group.store().wait(["written"])  # until then one message has come, and none is taken
    for m in range(2):
        net.receive(A, 0, minibatch=m)
    time.sleep(30)
    return ""


def test_writing_to_what_was_sent_is_noticed() -> None:
    found = outcomes(overwrites_rank, 2, awaited=[0], limit_s=25)[0]
    assert found.error is None, str(found)
    assert "the activation of minibatch" in found.value
    assert "for rank 1 (stage 1) was written to before it was sent" in found.value


def wrong_minibatch_rank(rank: int) -> None:
    net = Network(plan_of("1-1"), rank, timeout_s=5.0)
    if rank == 0:
        net.send(A, 1, message(1))
        time.sleep(20)
    else:
        net.receive(A, 0, minibatch=0)


def test_a_message_out_of_turn_is_our_mistake() -> None:
    found = outcomes(wrong_minibatch_rank, 2, awaited=[1], limit_s=30)[1]
    assert isinstance(found.error, AssertionError)
    assert "expected the activation of minibatch 0, got that of 1" in str(found.error)


def test_direct_transport_needs_cuda() -> None:
    with pytest.raises(ConfigError, match="direct transport on cpu") as caught:
        Network(plan_of("1-1"), 0, timeout_s=1.0, direct=True)
    assert "direct=false" in caught.value.remedy


def unsendable_rank(rank: int) -> bool:
    """A refused message harms nobody: the next one goes through."""
    net = Network(plan_of("1-1"), rank, timeout_s=10.0)
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
