"""The network between real ranks over gloo on loopback.

Every function named ``*_rank`` runs in each rank. Time limits here are upper bounds that
keep a hang from lasting, never measurements: what must overlap is shown by causality.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from sparsepipe.runtime.transport import differentiable
from sparsepipe.sparse import SparseTensor
from tests.support.plans import plan_of
from tests.support.processes import run, run_shared
from tests.support.transport_cases import A, B, G, R, cloud, digest, message, network
from tests.support.waiting import has_mark, post_mark, wait_for_marks

# What arrives


def exchange_rank(rank: int, minibatches: int) -> tuple[list[str], int, int]:
    """One forward, one backward; stage 1 answers with twice the features."""
    net = network("1-1", rank)
    seen = []
    for m in range(minibatches + 1):
        if rank == 0 and m < minibatches:
            net.send(B, 1, message(m, {"label": torch.arange(m)}))
            net.send(A, 1, message(m, cloud(m), version=m // 3))
        if rank == 0 and m > 0:
            back = net.receive(G, 1, minibatch=m - 1)
            assert back.meta == {"loss": (m - 1) / 7}
            seen.append(digest(*back.tree))
            del back
            net.release(m - 1)
        if rank == 1 and m < minibatches:
            got, rest = net.receive(A, 0, minibatch=m), net.receive(B, 0, minibatch=m)
            assert got.meta == {"version": m // 3}
            assert torch.equal(rest.tree["label"], torch.arange(m))
            seen.append(digest(got.tree.feats, got.tree.coords))
            net.send(G, 0, message(m, [2 * got.tree.feats], loss=m / 7))
            del got, rest
            net.release(m)
    assert net.pool.in_use == 0
    net.close()
    return seen, net.pool.made, net.pool.kept


def test_200_messages_of_changing_size_arrive_bit_for_bit() -> None:
    (up, made_up, kept_up), (down, made_down, kept_down) = run_shared(exchange_rank, 2, 200)
    clouds = [cloud(m) for m in range(200)]
    assert down == [digest(x.feats, x.coords) for x in clouds]
    assert up == [digest(2 * x.feats) for x in clouds]
    # Buffers grow as larger messages come; after that none is made any more.
    assert (kept_up, kept_down) == (0, 0)
    assert 0 < made_up <= 20
    assert 0 < made_down <= 40


def same_size_rank(rank: int, minibatches: int) -> tuple[int, int]:
    """Addresses at which messages of one size arrive, and buffers made for them."""
    net = network("1-1", rank)
    found = set()
    for m in range(minibatches):
        if rank == 0:
            net.send(A, 1, message(m, torch.full((100_000,), float(m))))
            net.receive(G, 1, minibatch=m)
        else:
            got = net.receive(A, 0, minibatch=m)
            assert bool((got.tree == m).all())
            found.add(got.tree.data_ptr())
            net.send(G, 0, message(m))
            del got
        net.release(m)
    net.close()
    assert (net.pool.in_use, net.pool.kept) == (0, 0)
    return len(found), net.pool.made


def test_receive_buffers_are_used_again_and_none_leaks() -> None:
    addresses, made = run_shared(same_size_rank, 2, 200)[1]
    assert 1 <= addresses <= made <= 2  # one in the worker's hands, one on its way


def pipeline_rank(rank: int, config: str, minibatches: int) -> dict[int, Any]:
    """Forwards with all replicas, the batch past the middle, then gradients and replies."""
    net, plan = network(config, rank), plan_of(config)
    stage, last = plan.stage_of(rank), plan.num_stages - 1
    found = {}
    for m in range(minibatches):
        if plan.rank_for(stage, m) != rank:
            continue
        here = {s: plan.rank_for(s, m) for s in range(last + 1)}
        x = torch.full((3000,), float(m))
        if stage == 0:
            net.send(B, here[last], message(m, {"label": m * 11}))
        else:
            x = net.receive(A, here[stage - 1], minibatch=m).tree
        if stage < last:
            net.send(A, here[stage + 1], message(m, x + 1))
            gradient = net.receive(G, here[stage + 1], minibatch=m).tree[0]
        else:
            label = net.receive(B, here[0], minibatch=m).tree["label"]
            gradient = x + label
            net.send(R, here[0], message(m, (rank, float(x[0]))))
        if stage > 0:
            net.send(G, here[stage - 1], message(m, [2 * gradient]))
        else:
            found[m] = float(gradient[0]), net.receive(R, here[last], minibatch=m).tree
        net.release(m)
    net.close()
    return found


@pytest.mark.parametrize("config", ["1-1", "2-1", "1-3", "1-1-1", "2-1-2", "1-2-3"])
def test_every_minibatch_finds_its_replicas(config: str) -> None:
    plan = plan_of(config)
    last = plan.num_stages - 1
    start = run_shared if plan.num_ranks <= 3 else run
    found = start(pipeline_rank, plan.num_ranks, config, 13)
    together = {m: value for each in found for m, value in each.items()}
    assert together == {
        m: ((m + last + 11 * m) * 2.0**last, (plan.rank_for(last, m), float(m + last)))
        for m in range(13)
    }


def autograd_rank(rank: int) -> Any:
    """A small network in two halves: is the first half's gradient that of the whole?"""
    net = network("1-1", rank)
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 300), torch.nn.Linear(300, 1)
    x = torch.randn(90, 8)
    if rank == 0:
        y = first(x)
        tree = {"y": y, "unused": y[:1], "coords": torch.zeros(5000, dtype=torch.int64)}
        net.send(A, 1, message(0, tree))
        back = net.receive(G, 1, minibatch=0).tree
        assert [gradient is None for gradient in back] == [False, True]
        torch.autograd.backward([differentiable(tree)[0]], [back[0]])
        again = torch.nn.Linear(8, 300)
        again.load_state_dict(first.state_dict())
        second(again(x)).square().sum().backward()
        found = torch.equal(first.weight.grad, again.weight.grad)
    else:
        got = net.receive(A, 0, minibatch=0).tree
        second(got["y"]).square().sum().backward()
        net.send(G, 0, message(0, [leaf.grad for leaf in differentiable(got)]))
        found = True
    sent = net.sent[G].payload_bytes
    net.close()
    return found, sent


def test_gradients_pass_through_and_coordinates_do_not() -> None:
    assert run_shared(autograd_rank, 2) == [(True, 0), (True, 90 * 300 * 4)]


# How much


def counting_rank(rank: int, config: str) -> dict[str, tuple[int, int, int]]:
    net, last = network(config, rank), plan_of(config).num_ranks - 1
    x = SparseTensor(torch.zeros(1000, 7), torch.zeros(1000, 4, dtype=torch.int32))
    for m in range(5):
        if rank == 0:
            rest = {"label": torch.zeros(64, dtype=torch.int64), "index": torch.zeros(1000)}
            net.send(B, last, message(m, rest))
            net.send(A, 1, message(m, x))
            net.receive(G, 1, minibatch=m)
        else:
            net.receive(A, rank - 1, minibatch=m)
            if rank == last:
                net.receive(B, 0, minibatch=m)
            else:
                net.send(A, rank + 1, message(m, x))
                net.receive(G, rank + 1, minibatch=m)
            net.send(G, rank - 1, message(m, [x.feats]))
        net.release(m)
    net.close()
    return {
        kind.value: (t.messages, t.payload_bytes, t.overhead_bytes) for kind, t in net.sent.items()
    }


FEATURES, SITES, REST = 1000 * 7 * 4, 1000 * 4 * 4, 64 * 8 + 1000 * 4
HEADER = 4096  # a packet's header, in which up to 2048 bytes of small tensors travel


def test_bytes_are_the_least_and_one_header_a_packet() -> None:
    assert run_shared(counting_rank, 2, "1-1") == [
        {
            "activation": (5, 5 * (FEATURES + SITES), 5 * (HEADER - 64 * 8)),
            "gradient": (0, 0, 0),
            "batch": (5, 5 * REST, 0),  # in the same packets
            "reply": (0, 0, 0),
        },
        {
            "activation": (0, 0, 0),
            "gradient": (5, 5 * FEATURES, 5 * HEADER),
            "batch": (0, 0, 0),
            "reply": (0, 0, 0),
        },
    ]


# When

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
