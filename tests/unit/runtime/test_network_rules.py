"""Ranks that break a rule of the transport: the errors that they, or their peers, raise."""

from __future__ import annotations

import pytest
import torch

from sparsepipe.errors import ConfigError
from sparsepipe.runtime.transport import Network
from tests.support.plans import plan_of
from tests.support.processes import outcomes, run
from tests.support.transport_cases import A, G, complaint, message
from tests.support.waiting import LONG_S, post_mark, stay, wait_for_marks


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
