"""Sums over ranks of vectors on CUDA devices; runs only where there are any."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from processes import run

from sparsepipe.runtime.chain import Chain
from sparsepipe.runtime.meeting import new_group
from sparsepipe.runtime.ordered_sum import OrderedSum
from sparsepipe.schedule.sums import Way

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_three = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
LENGTH, CHUNK = 1000, 64


def addend(rank: int, time: int) -> torch.Tensor:
    """Of very unlike sizes, so that another order shows."""
    generator = torch.Generator().manual_seed(31 * rank + 1000 * time)
    sizes = torch.exp(8 * torch.rand(LENGTH, generator=generator))
    return torch.randn(LENGTH, generator=generator) * sizes


def summed(rank: int, way: Way, backend: str, devices: int) -> list[torch.Tensor]:
    device = torch.device("cuda", rank % devices)
    torch.cuda.set_device(device)
    group = new_group([0, 1, 2], backend=backend, timeout_s=60.0)
    total = OrderedSum(
        group, length=LENGTH, dtype=torch.float32, device=device, way=way, chunk=CHUNK
    )
    busy = torch.randn(2000, 2000, device=device)
    found = []
    for time in range(5):
        for _ in range(5):
            busy = busy @ busy / busy.norm()
        # The sum must wait for what slow kernels make, and its copy for those that read it.
        total.values.copy_(addend(rank, time).to(device) + 0 * busy[0, 0])
        total.reduce()
        assert total.values.device == device
        found.append((total.values + 0 * busy[0, 0]).cpu())
    dist.destroy_process_group(group)
    return found


def check(way: Way, backend: str, devices: int) -> None:
    for found in run(summed, 3, way, backend, devices, limit_s=240):
        for time, value in enumerate(found):
            expected = addend(0, time) + addend(1, time) + addend(2, time)
            assert torch.equal(value, expected)


@needs_device
@pytest.mark.parametrize("way", get_args(Way))
def test_over_gloo_from_one_device_by_way_of_host_memory(way: Way) -> None:
    check(way, "gloo", 1)


@needs_three
@pytest.mark.parametrize("way", get_args(Way))
def test_over_nccl_directly_whatever_is_asked(way: Way) -> None:
    check(way, "nccl", 3)


def test_a_chain_refuses_memory_of_a_device() -> None:
    """Before it asks anything of its group; ``meta`` stands for devices that are not here."""
    vector = torch.empty(LENGTH, device="meta")
    with pytest.raises(ValueError, match="in host memory, and this one is on meta") as caught:
        Chain(None, vector)  # type: ignore[arg-type]
    assert "sum a copy there" in str(caught.value)
