"""Sums over ranks have the bits of a loop in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import Tensor

from sparsepipe.runtime.ordered_sum import OrderedSum

LENGTHS = [1, 2, 7, 1000]


def addend(rank: int, length: int) -> Tensor:
    """Of very unlike sizes, so that another order shows."""
    generator = torch.Generator().manual_seed(31 * rank + length)
    sizes = torch.exp(8 * torch.rand(length, generator=generator))
    return torch.randn(length, generator=generator) * sizes


def summed(rank: int, dtype: torch.dtype) -> list[Tensor]:
    assert dist.group.WORLD is not None
    found = []
    for length in LENGTHS:
        total = OrderedSum(dist.group.WORLD, length=length, dtype=dtype, device=torch.device("cpu"))
        for _ in range(2):  # its memory is used again
            total.values.copy_(addend(rank, length))
            total.reduce()
        found.append(total.values.clone())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_bits_are_those_of_a_loop(ranks: int, dtype: torch.dtype) -> None:
    everyone = run(summed, ranks, dtype)
    for place, length in enumerate(LENGTHS):
        expected = addend(0, length).to(dtype)
        for rank in range(1, ranks):
            expected = expected + addend(rank, length).to(dtype)
        assert all(torch.equal(found[place], expected) for found in everyone)


def test_another_order_has_other_bits() -> None:
    """Else the test above could not fail."""
    a, b, c = (addend(rank, 1000) for rank in range(3))
    assert not torch.equal(a + b + c, c + b + a)
