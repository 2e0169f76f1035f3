"""A rank that ends or stands still amid a chain: all others name it, those far from it too."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sparsepipe.runtime.collectives.ordered_sum import OrderedSum
from sparsepipe.runtime.failures.missing_ranks import collective, new_group
from tests.support.processes import outcomes
from tests.support.transport_cases import complaint
from tests.support.waiting import LONG_S, shorten

CHUNK = 1000
CHUNKS = 40
AMID = 12


def when(number: int, do: Callable[[], None]) -> None:
    """Does something when this rank is to send its ``number``-th chunk from now on."""
    isend, sent = dist.isend, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == number:
            do()
        return isend(*args, **kwargs)

    dist.isend = counted  # type: ignore[assignment]


def chain_rank(rank: int, ranks: int, ends: int, signum: int, limit_s: float) -> None:
    group = new_group(list(range(ranks)), backend="gloo", timeout_s=LONG_S)
    total = OrderedSum(
        group,
        length=CHUNKS * CHUNK,
        dtype=torch.float32,
        device=torch.device("cpu"),
        way="chain",
        chunk=CHUNK,
    )
    with collective("a first sum", group):
        total.reduce()
    shorten(limit_s, group)
    if rank == ends:
        when(AMID, lambda: os.kill(os.getpid(), signum))
    with collective("a sum", group):
        total.reduce()


@pytest.mark.parametrize("ends", [0, 2, 4])
def test_a_killed_rank_is_named_by_all_at_once(ends: int) -> None:
    others = [rank for rank in range(5) if rank != ends]
    found = outcomes(chain_rank, 5, 5, ends, signal.SIGKILL, LONG_S, awaited=others)
    for rank in others:
        text = complaint(found[rank])
        assert text == f"rank {ends} is gone: its connection to rank {rank} broke during a sum"
        assert found[rank].ended_s < 40  # not at the limit


@pytest.mark.parametrize(
    "ends", [2, *(pytest.param(rank, marks=pytest.mark.full) for rank in (0, 4))]
)
def test_a_stopped_rank_is_named_by_all_at_the_limit(ends: int) -> None:
    """Who gives up first breaks the others' connections: these may say that it is gone."""
    others = [rank for rank in range(5) if rank != ends]
    found = outcomes(chain_rank, 5, 5, ends, signal.SIGSTOP, 3.0, awaited=others)
    told = [complaint(found[rank]) for rank in others]
    assert all(text.startswith(f"rank {ends} ") for text in told), told
    assert any("did not take part in a sum with rank" in text for text in told)
    for rank in others:
        assert found[rank].ended_s < 40
