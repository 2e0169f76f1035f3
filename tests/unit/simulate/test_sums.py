"""Buckets of gradients against those that torch's DDP makes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sparsepipe.simulate.sums import buckets

KIB = 1024


@pytest.mark.parametrize("cap_kib", [1, 64, 1024, 25 * 1024])
@pytest.mark.parametrize(
    "layers_kib",
    [
        [160, 0, 4096, 0, 40_000, 8, 8, 8],  # as in the backward of a VGG: small, then large
        [1, 2, 3, 1024, 1, 2048, 30_000],
        [64] * 40,
        [5],
    ],
)
def test_they_are_those_of_ddp(layers_kib: list[int], cap_kib: int) -> None:
    sizes = [KIB * size for size in layers_kib]
    parameters = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes if size]
    numbers = [number for number, size in enumerate(sizes) if size]
    expected, _ = dist._compute_bucket_assignment_by_size(parameters, [KIB * cap_kib])
    by_layer = [
        (numbers[bucket[-1]], float(sum(sizes[numbers[k]] for k in bucket))) for bucket in expected
    ]
    found = [(last, held) for last, held in buckets(sizes, KIB * cap_kib) if held]
    # Layers without parameters lie in a bucket, but end none.
    assert [held for _, held in found] == [held for _, held in by_layer]
    assert [last for last, _ in found[:-1]] == [last for last, _ in by_layer[:-1]]
    assert found[-1][0] >= by_layer[-1][0]


def test_a_full_bucket_ends_with_the_layer_that_fills_it() -> None:
    assert buckets([3.0, 3.0, 5.0, 1.0], 6.0) == [(1, 6.0), (3, 6.0)]
    assert buckets([3.0, 9.0, 1.0], 6.0) == [(1, 12.0), (2, 1.0)]
