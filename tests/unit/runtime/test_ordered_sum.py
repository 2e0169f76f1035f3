"""Sums over ranks have the bits of a loop in one process."""

from __future__ import annotations

import os
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sparsepipe.runtime.collectives import ordered_sum
from sparsepipe.runtime.collectives.ordered_sum import ChainSum, OrderedSum
from sparsepipe.schedule.communication import Way, way_of
from tests.support.processes import run, run_shared

CPU = torch.device("cpu")
CHUNK = 64
# Below, at and above a chunk; at and above all that may lie at a rank; many.
LENGTHS = [1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK, 4 * CHUNK + 1, 1000]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def addend(rank: int, length: int, time: int = 0) -> Tensor:
    """Of very unlike sizes, so that another order shows."""
    generator = torch.Generator().manual_seed(31 * rank + length + 1000 * time)
    sizes = torch.exp(8 * torch.rand(length, generator=generator))
    return torch.randn(length, generator=generator) * sizes


CASES = [(way, dtype, length) for way in get_args(Way) for dtype in DTYPES for length in LENGTHS]


def summed(rank: int) -> list[Tensor]:
    assert dist.group.WORLD is not None
    found = []
    for way, dtype, length in CASES:
        total = OrderedSum(
            dist.group.WORLD, length=length, dtype=dtype, device=CPU, way=way, chunk=CHUNK
        )
        for time in range(3):  # its memory is used again
            total.values.copy_(addend(rank, length, time))
            total.reduce()
            found.append(total.values.clone())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_bits_are_those_of_a_loop(ranks: int) -> None:
    everyone = (run_shared if ranks <= 3 else run)(summed, ranks)
    place = 0
    for way, dtype, length in CASES:
        for time in range(3):
            expected = addend(0, length, time).to(dtype)
            for rank in range(1, ranks):
                expected = expected + addend(rank, length, time).to(dtype)
            what = (way, dtype, length, time)
            assert all(torch.equal(found[place], expected) for found in everyone), what
            place += 1


def test_another_order_has_other_bits() -> None:
    """Else the test above could not fail."""
    a, b, c = (addend(rank, 1000) for rank in range(3))
    assert not torch.equal(a + b + c, c + b + a)


SHORT, LONG = 100, 2_000_000
CHOICES = [("AAB", LONG, True), ("AAB", SHORT, False), ("ABC", LONG, False), ("AAA", LONG, False)]


def chosen(rank: int) -> list[tuple[bool, Tensor]]:
    """Whether a chain was made, by ranks that seem to be on some hosts."""
    made, found = [], []
    init = ChainSum.__init__

    def noted(self: ChainSum, *args: object, **kwargs: object) -> None:
        made.append(self)
        init(self, *args, **kwargs)  # type: ignore[arg-type]

    ChainSum.__init__ = noted  # type: ignore[method-assign]
    assert dist.group.WORLD is not None
    for hosts, length, _ in CHOICES:
        number = ord(hosts[rank])
        ordered_sum._host_number = lambda number=number: number  # type: ignore[attr-defined]
        made.clear()
        total = OrderedSum(dist.group.WORLD, length=length, dtype=torch.float32, device=CPU)
        total.values.copy_(addend(rank, length))
        total.reduce()
        found.append((bool(made), total.values))
    return found


def test_the_way_is_chosen_by_the_hosts_of_the_ranks_and_the_size() -> None:
    everyone = run(chosen, 3)
    for place, (hosts, length, chain) in enumerate(CHOICES):
        assert (way_of(hosts, 4 * length) == "chain") is chain
        for found in everyone:
            made, values = found[place]
            assert made is chain
            assert torch.equal(values, sum(addend(rank, length) for rank in range(3)))


def here(rank: int) -> tuple[int, int]:
    return ordered_sum._host_number(), os.getpid()


def test_processes_of_one_machine_are_on_one_host() -> None:
    said = run_shared(here, 2)
    assert said[0][0] == said[1][0] == ordered_sum._host_number()
    assert said[0][1] != said[1][1]
