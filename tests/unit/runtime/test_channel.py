"""Pool, mailbox and routes, each alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsepipe.runtime.transport.channel import SMALLEST_BYTES, BoundedQueue, BufferPool, Ended
from sparsepipe.runtime.transport.serialization import default_depth, routes
from tests.support.plans import plan_of
from tests.support.transport_cases import A, B, G, R

MIB = 1 << 20


@given(st.integers(0, 1 << 24))
def test_size_classes_waste_little(size: int) -> None:
    found = BufferPool().take(size).numel()
    assert found >= size
    assert found == SMALLEST_BYTES or 5 * (found - size) < found
    assert BufferPool().take(found).numel() == found


def test_a_buffer_comes_back_for_another_size_of_its_class() -> None:
    pool = BufferPool()
    first = pool.take(MIB - 5)
    address = first.data_ptr()
    pool.give_back(first)
    del first
    assert pool.take(MIB - 9_000).data_ptr() == address
    assert (pool.made, pool.in_use, pool.kept) == (1, 1, 0)


@pytest.mark.parametrize("how", ["tensor", "view", "graph", "stolen gradient"])
def test_a_buffer_that_is_referred_to_is_not_used_again(how: str) -> None:
    pool = BufferPool()
    buffer = pool.take(MIB)
    tensor = torch.empty(0).set_(buffer.untyped_storage(), 0, (100,), (1,)).fill_(1)
    parameter = torch.nn.Parameter(torch.zeros(4, 25))
    kept = None
    if how == "tensor":
        kept = tensor
    elif how == "view":
        kept = tensor[3:5]
    elif how == "graph":
        kept = (tensor * parameter.flatten()).sum()
    else:  # autograd makes a view of what it is given the parameter's gradient
        (parameter + torch.zeros(4, 25)).flatten().backward(tensor)
        assert parameter.grad.data_ptr() == buffer.data_ptr()
    address = buffer.data_ptr()
    pool.give_back(buffer)
    del buffer, tensor
    assert pool.take(MIB).data_ptr() != address
    assert (pool.made, pool.kept, pool.in_use) == (2, 1, 1)
    del kept


def test_unused_memory_never_exceeds_what_was_in_use() -> None:
    pool = BufferPool()
    for size in (1, 2, 3, 5, 8, 5, 3):  # never two at once
        pool.give_back(pool.take(size * MIB))
        assert sum(map(torch.numel, pool._free)) <= 8 * MIB
    assert pool.in_use == 0


def test_a_mailbox_keeps_order_makes_both_sides_wait_and_ends() -> None:
    box: BoundedQueue[int] = BoundedQueue(2)
    with pytest.raises(TimeoutError):
        box.get(limit_s=0.01)
    threading.Timer(0.05, box.put, [5]).start()
    assert box.get(limit_s=30) == 5
    box.put(0)
    box.put(1)
    with pytest.raises(TimeoutError):
        box.put(2, limit_s=0.01)
    assert box.get() == 0
    box.put(2, limit_s=0.01)
    box.end()
    assert list(box) == [1, 2]
    with pytest.raises(Ended):
        box.get()


@pytest.mark.parametrize("side", ["put", "get"])
def test_a_failure_ends_all_waits(side: str) -> None:
    box: BoundedQueue[int] = BoundedQueue(1)
    if side == "put":
        box.put(0)
    threading.Timer(0.05, box.fail, [OSError("broken")]).start()
    started_s = time.monotonic()
    with pytest.raises(OSError, match="broken"):
        box.put(1, limit_s=30) if side == "put" else box.get(limit_s=30)
    assert time.monotonic() - started_s < 20
    with pytest.raises(OSError, match="broken"):  # and everybody who comes later
        box.get()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("2-1", "A02 G20 A12 G21 R20 R21"),  # a batch travels with the activation
        ("1-2-1", "A01 G10 A02 G20 A13 G31 A23 G32 R30 B03"),
    ],
)
def test_routes_between_stages(config: str, expected: str) -> None:
    found = [f"{r.kind.name[0]}{r.source}{r.target}" for r in routes(plan_of(config))]
    assert " ".join(found) == expected


def test_the_depth_is_the_upper_stages_warm_up_and_one() -> None:
    plan = plan_of("1-1-1")
    depths = {(r.kind, r.source, r.target): default_depth(plan, r) for r in routes(plan)}
    first = dict.fromkeys([(A, 0, 1), (G, 1, 0), (B, 0, 2), (R, 2, 0)], 3)
    assert depths == {**first, (A, 1, 2): 2, (G, 2, 1): 2}
