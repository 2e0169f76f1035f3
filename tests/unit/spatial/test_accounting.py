"""Bytes that shards send and keep, beside what the algebra says and what one process keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparsepipe.spatial import Grid, spatialize
from sparsepipe.spatial.intervals import Window, sent_bytes
from tests.support.processes import run_shared
from tests.support.spatial_accounting import counted, layers_of, saved_bytes
from tests.support.spatial_nets import UNet, chain
from tests.support.spatial_networks import CLASSES, GRIDS, Case, cases

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


EVEN = {
    "cnn1d": (512,),
    "cnn2d": (48, 64),
    "cnn3d": (16, 8, 32),
    "fcn2d": (64, 128),
    "unet3d": (16, 8, 32),
    "densenet3d": (32, 16, 64),
    "convnext_tiny": (64, 128),
}
"""Sizes of which every layer leaves each of four ranks as much."""
WIDTHS = {"cnn1d": 1.0}
"""Interpolation keeps indices of positions, which in one dimension weigh as much as a channel."""


def network_bytes(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Of each network: bytes that this rank sends and keeps, and what one process keeps."""
    torch.set_num_threads(1)
    grids = {dimensions: Grid(shape) for dimensions, shape in GRIDS[ranks].items()}
    return {case.title: of_network(case, grids[len(case.size)]) for case in cases()}


def of_network(case: Case, grid: Grid) -> dict[str, Any]:
    def made(**settings: Any) -> nn.Module:
        torch.manual_seed(0)
        again = case.checkpointing
        return case.make(CLASSES, head=case.head, checkpointing=again, **settings).double()

    net = spatialize(made(), grid)
    whole = torch.randn(2, 1, *case.size, dtype=torch.float64)
    with counted() as forward:
        output = net(grid.shard(whole).clone())
    with counted() as backward:
        output.sum().backward()
    layers = layers_of(made(), whole, grid.shape)

    whole = torch.randn(2, 1, *EVEN[case.name], dtype=torch.float64)
    width = {"width": WIDTHS[case.name]} if case.name in WIDTHS else {}
    halos = layers_of(made(**width), whole, grid.shape)
    return {
        "layers": layers,
        "forward": sum(forward),
        "step": sum(forward) + sum(backward),
        "alone": saved_bytes(made(**width), whole),
        "halos": sum(each.sent[grid.rank] for each in halos),
        "kept": saved_bytes(spatialize(made(**width), grid), grid.shard(whole).clone()),
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_network_sends_what_the_algebra_counts_and_keeps_its_share(ranks: int) -> None:
    everyone = run_shared(network_bytes, ranks, ranks, limit_s=240)
    for case in cases():
        found = [each[case.title] for each in everyone]
        layers = found[0]["layers"]
        for rank, mine in enumerate(found):
            assert mine["forward"] == sum(each.sent[rank] for each in layers), (case.title, rank)
            bound = 1.05 / ranks * mine["alone"] + mine["halos"]
            assert mine["kept"] <= bound, (case.title, mine)
        expected = sum(each.passes * sum(each.sent) for each in layers)
        assert sum(mine["step"] for mine in found) == expected, case.title
