"""When messages travel between real ranks over gloo on loopback.

Every function named ``*_rank`` runs in each rank. What must overlap is shown by causality;
time limits are upper bounds that keep a hang from lasting, never measurements.
"""

import gc
import os
import threading
import time
from collections.abc import Sequence

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


def used() -> tuple[int, int]:
    """Threads and files of this process; what has ended may be counted a little longer."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def grown(before: Sequence[tuple[int, int]]) -> bool:
    """Whether there are more threads or files than at any of some earlier times."""
    return any(now > min(then) for now, then in zip(used(), zip(*before, strict=True), strict=True))


def reopened_rank(rank: int) -> tuple[list[int], bool]:
    """Channels' threads after each network's end; whether anything grows from the second on."""
    left, before = [], []
    for number in range(4):
        net = network("1-1-1", rank)
        for m in range(6):  # alike, so that one more is asked for as the network closes
            if rank < 2:
                net.send(A, rank + 1, message(m, torch.zeros(40_000)))
            if rank > 0:
                net.receive(A, rank - 1, minibatch=m)
                net.release(m)
        net.close()
        net.close()  # twice is no harm
        left.append(len([t for t in threading.enumerate() if t.name.endswith(("-in", "-out"))]))
        del net
        gc.collect()  # sockets go with the groups
        while number == 1 and len(before) < 20:
            time.sleep(0.02)
            before.append(used())
    deadline_s = time.monotonic() + 20
    while grown(before) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return left, grown(before)


def test_closing_leaves_nothing_behind() -> None:
    assert run(reopened_rank, 3) == [([0] * 4, False)] * 3
