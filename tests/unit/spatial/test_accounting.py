"""Bytes that shards send and keep, beside what the algebra says and what one process keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.runtime.collectives.halo import start_messages
from sparsepipe.spatial import Grid, spatialize
from sparsepipe.spatial import grid as grid_module
from sparsepipe.spatial.intervals import Window, sent_bytes
from tests.support.processes import run_shared
from tests.support.spatial_nets import UNet, chain

SAMPLES, CHANNELS, ELEMENT_BYTES = 2, 4, 8
LAYERS: dict[str, tuple[Callable[[], nn.Module], Window]] = {
    "convolution": (
        lambda: nn.Conv2d(CHANNELS, 6, 5, padding=2),
        Window(kernel=5, before=2, after=2),
    ),
    "strided and dilated": (
        lambda: nn.Conv2d(CHANNELS, 6, 3, stride=2, padding=2, dilation=2),
        Window(kernel=3, stride=2, before=2, after=2, dilation=2),
    ),
    "wider than shards": (
        lambda: nn.Conv2d(CHANNELS, CHANNELS, 9, padding=4, groups=CHANNELS),
        Window(kernel=9, before=4, after=4),
    ),
    "transposed": (
        lambda: nn.ConvTranspose2d(CHANNELS, 6, 4, stride=2, padding=1),
        Window(kernel=4, stride=2, before=1, after=1, transposed=True),
    ),
    "overlapping pool": (
        lambda: nn.MaxPool2d(3, 2, 1),
        Window(kernel=3, stride=2, before=1, after=1),
    ),
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each group of messages that this rank sends."""
    found: list[int] = []

    def counting(sends: Sequence[tuple[int, Tensor]], *rest: Any, **more: Any) -> Any:
        found.append(sum(tensor.numel() * tensor.element_size() for _, tensor in sends))
        return start_messages(sends, *rest, **more)

    with patch.object(grid_module, "start_messages", counting):
        yield found


def sent_by_layers(rank: int, shape: tuple[int, ...], size: tuple[int, ...]) -> dict[str, Any]:
    """Of each layer: what this rank sends in a forward pass, and in a step with and without a
    gradient of the input.
    """
    grid, found = Grid(shape), {}
    for name, (make, _) in LAYERS.items():
        layer = spatialize(make().double(), grid)
        bytes_sent = []
        for needs_gradient in (False, True):
            x = grid.shard(torch.randn(SAMPLES, CHANNELS, *size, dtype=torch.float64))
            x = x.clone().requires_grad_(needs_gradient)
            with counted() as forward:
                output = layer(x)
            with counted() as backward:
                if output.requires_grad:
                    output.sum().backward()
            bytes_sent.append((sum(forward), sum(forward) + sum(backward)))
        found[name] = bytes_sent
    return found


@pytest.mark.parametrize(
    ("shape", "size"), [((3,), (10, 13)), ((2, 2), (11, 14)), ((1, 4), (5, 9))], ids=str
)
def test_bytes_sent_are_those_of_the_algebra(shape: tuple[int, ...], size: tuple[int, int]) -> None:
    everyone = run_shared(sent_by_layers, math.prod(shape), shape, size)
    uncut = math.prod(size[: len(size) - len(shape)])
    for name, (make, window) in LAYERS.items():
        expected = sent_bytes(
            [window] * len(shape),
            size[len(size) - len(shape) :],
            shape,
            position_bytes=SAMPLES * CHANNELS * uncut * ELEMENT_BYTES,
        )
        assert sum(expected) > 0
        for rank, found in enumerate(everyone):
            assert [forward for forward, _ in found[name]] == [expected[rank]] * 2, (name, rank)
        without, with_gradient = (sum(found[name][k][1] for found in everyone) for k in range(2))
        has_weights = any(True for _ in make().parameters())
        assert without == (2 if has_weights else 1) * sum(expected), name
        assert with_gradient == 3 * sum(expected), name


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a forward pass, storages counted once, without parameters."""
    theirs = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in theirs:
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is given out twice
        return tensor

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(storages.values())


def saved(rank: int, shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Of each network: bytes kept by one process and by this rank."""
    grid, found = Grid(shape), {}
    for name, network in {"chain": chain(16), "u-net": UNet()}.items():
        x = torch.randn(1, 2, 16, 24, 32)
        alone = saved_bytes(copy.deepcopy(network), x)
        found[name] = alone, saved_bytes(spatialize(network, grid), grid.shard(x).clone())
    return found


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_a_rank_keeps_its_share_of_what_one_process_keeps(shape: tuple[int, ...]) -> None:
    """No halos are among it: they are fetched again in the backward pass."""
    ranks = math.prod(shape)
    for found in run_shared(saved, ranks, shape):
        for name, (alone, mine) in found.items():
            assert mine <= 1.05 / ranks * alone, name


def test_an_overlapping_pool_keeps_no_copy_of_its_input() -> None:
    for alone, mine in run_shared(saved_by_a_pool, 2):
        assert mine <= 1.05 / 2 * alone


def saved_by_a_pool(rank: int) -> tuple[int, int]:
    grid = Grid((1, 2))
    network = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.ReLU())
    x = torch.randn(1, 2, 32, 64)
    alone = saved_bytes(copy.deepcopy(network), x)
    return alone, saved_bytes(spatialize(network, grid), grid.shard(x).clone())
