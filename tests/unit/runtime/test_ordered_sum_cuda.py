"""Sums over ranks of vectors on CUDA devices."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist

from sparsepipe.runtime.collectives.ordered_sum import OrderedSum
from sparsepipe.runtime.failures.missing_ranks import new_group
from sparsepipe.schedule.communication import Way
from tests.support.busy_device import late_zero
from tests.support.processes import run

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_three = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
LENGTH, CHUNK = 1000, 64


def addend(rank: int, time: int) -> torch.Tensor:
    """Of very unlike sizes, so that another order shows."""
    generator = torch.Generator().manual_seed(31 * rank + 1000 * time)
    sizes = torch.exp(8 * torch.rand(LENGTH, generator=generator))
    return torch.randn(LENGTH, generator=generator) * sizes


def summed(rank: int, backend: str, devices: int) -> dict[Way, list[torch.Tensor]]:
    device = torch.device("cuda", rank % devices)
    torch.cuda.set_device(device)
    return {way: summed_by(way, rank, backend, device) for way in get_args(Way)}


def summed_by(way: Way, rank: int, backend: str, device: torch.device) -> list[torch.Tensor]:
    group = new_group([0, 1, 2], backend=backend, timeout_s=60.0)
    total = OrderedSum(
        group, length=LENGTH, dtype=torch.float32, device=device, way=way, chunk=CHUNK
    )
    found = []
    for time in range(5):
        # The sum must wait for what slow kernels make, and its copy for those that read it.
        total.values.copy_(addend(rank, time).to(device) + late_zero(device))
        total.reduce()
        assert total.values.device == device
        found.append((total.values + late_zero(device)).cpu())
    dist.destroy_process_group(group)
    return found


def check(backend: str, devices: int) -> None:
    for ways in run(summed, 3, backend, devices, limit_s=240):
        assert len(ways) == len(get_args(Way))
        for way, found in ways.items():
            for time, value in enumerate(found):
                expected = addend(0, time) + addend(1, time) + addend(2, time)
                assert torch.equal(value, expected), way


def test_over_gloo_from_one_device_by_way_of_host_memory() -> None:
    check("gloo", 1)


@needs_three
def test_over_nccl_directly_whatever_is_asked() -> None:
    check("nccl", 3)
