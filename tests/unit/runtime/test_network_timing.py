"""When messages travel between real ranks over gloo on loopback.

Every function named ``*_rank`` runs in each rank. What must overlap is shown by causality;
time limits are upper bounds that keep a hang from lasting, never measurements.
"""

import time

import torch

from tests.support.processes import run
from tests.support.transport_cases import A, G, message, network
from tests.support.waiting import has_mark, post_mark, wait_for_marks

BIG = 3_000_000  # 12 MB of floats: more than sockets take in


def overlap_rank(rank: int) -> bool:
    """Each sends to the other before any receives; none receives before all have sent."""
    net = network("1-1", rank, queue_depth=2)
    out, back = (A, G) if rank == 0 else (G, A)
    for m in range(2):
        net.send(out, 1 - rank, message(m, torch.full((BIG,), float(m))))
    post_mark(f"sent by {rank}")
    wait_for_marks(f"sent by {1 - rank}")
    good = [bool((net.receive(back, 1 - rank, minibatch=m).tree == m).all()) for m in range(2)]
    net.close()
    return all(good)


def test_both_sides_go_on_before_the_other_asks() -> None:
    assert run(overlap_rank, 2) == [True, True]


def pressure_rank(rank: int) -> list[bool]:
    """Depth 1: one lies ready at the receiver, one is in transfer, one is in the queue."""
    net = network("1-1", rank, queue_depth=1)
    found = []
    if rank == 0:
        for m in range(4):
            net.send(A, 1, message(m, torch.zeros(BIG)))
            post_mark(f"sent {m}")
    else:
        wait_for_marks("sent 2")  # three do not wait
        time.sleep(0.3)
        found.append(has_mark("sent 3"))
        net.receive(A, 0, minibatch=0)
        wait_for_marks("sent 3")
        for m in range(1, 4):
            net.receive(A, 0, minibatch=m)
    net.close()
    return found


def test_a_full_channel_holds_the_sender_back() -> None:
    assert run(pressure_rank, 2) == [[], [False]]
