"""Bytes that shards send and keep, beside what the algebra says and what one process keeps."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd

from sparsepipe.models.chain import Resized, parted
from sparsepipe.runtime.collectives.halo import start_messages
from sparsepipe.spatial import Grid, spatialize
from sparsepipe.spatial import grid as grid_module
from sparsepipe.spatial.convolution import as_tuple
from sparsepipe.spatial.intervals import Interval, Window, exchanges, sent_bytes, shares
from sparsepipe.spatial.shard import local_of
from tests.support.processes import run_shared
from tests.support.spatial_nets import UNet, chain
from tests.support.spatial_networks import CLASSES, GRIDS, Case, cases


@contextmanager
def counted() -> Iterator[list[int]]:
    found: list[int] = []

    def counting(sends: Sequence[tuple[int, Tensor]], *rest: Any, **more: Any) -> Any:
        found.append(sum(tensor.numel() * tensor.element_size() for _, tensor in sends))
        return start_messages(sends, *rest, **more)

    with patch.object(grid_module, "start_messages", counting):
        yield found


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """What autograd keeps of a forward pass, storages counted once, without parameters."""
    theirs = {each.untyped_storage().data_ptr() for each in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local_of(tensor).untyped_storage()  # what is checkpointed keeps a shard itself
        if storage.data_ptr() not in theirs:
            storages[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no address is given out twice
        return tensor

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(storages.values())


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Returns what the ranks of a grid send for a layer."""

    sent: tuple[int, ...]  # bytes of each rank in the forward pass
    passes: int  # how often all ranks together send as many in a training step


def layers_of(model: nn.Module, x: Tensor, parts: Sequence[int]) -> list[LayerBytes]:
    found: list[LayerBytes] = []

    again = {
        layer
        for block in model.modules()
        if getattr(block, "checkpointing", False)
        for layer in block.modules()
    }

    def note(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        value, output = parted(args[0])[0], parted(result)[0]
        if isinstance(module, Resized):
            found.append(LayerBytes(_resized(value, output, parts), 2))
            return
        count = value.dim() - 2
        windows = [_window(module, axis, value, output) for axis in range(count)]
        position_bytes = value.shape[0] * value.shape[1] * value.element_size()
        sent = sent_bytes(windows, value.shape[2:], parts, position_bytes=position_bytes)
        passes = 3 if found else 2  # the sample itself needs no gradient
        found.append(LayerBytes(sent, passes + (module in again)))

    kinds = (_ConvNd, _MaxPoolNd, _AvgPoolNd, Resized)
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(note)
    model(x)
    return found


def _window(module: Any, axis: int, value: Tensor, output: Tensor) -> Window:
    def of(name: str) -> int:
        return as_tuple(getattr(module, name), value.dim() - 2)[axis]

    common = {"kernel": of("kernel_size"), "stride": of("stride")}
    padding = {"before": of("padding"), "after": of("padding")}
    if isinstance(module, _AvgPoolNd | _MaxPoolNd):
        dilation = of("dilation") if isinstance(module, _MaxPoolNd) else 1
        return Window(**common, **padding, dilation=dilation, ceil_mode=bool(module.ceil_mode))
    window = Window(**common, **padding, dilation=of("dilation"))
    if isinstance(module, _ConvTransposeNd):
        window = Window(**common, **padding, dilation=of("dilation"), transposed=True)
        more = output.shape[2 + axis] - window.output_size(value.shape[2 + axis])
        window = Window(
            **common, **padding, dilation=of("dilation"), transposed=True, output_padding=more
        )
    assert window.output_size(value.shape[2 + axis]) == output.shape[2 + axis]
    return window


def _resized(value: Tensor, output: Tensor, parts: Sequence[int]) -> tuple[int, ...]:
    """Linear interpolation, one dimension after the other; an output has two neighbours."""
    sizes = list(value.shape[2:])
    found = dict.fromkeys(itertools.product(*map(range, parts)), 0)
    for axis, (n, m) in enumerate(zip(list(sizes), output.shape[2:], strict=True)):
        if n == m:
            continue
        places = [max((o + 0.5) * n / m - 0.5, 0.0) for o in range(m)]
        needs = [
            Interval(math.floor(places[each.start]), min(math.floor(places[each.stop - 1]) + 2, n))
            for each in shares(m, parts[axis])
        ]
        plans = exchanges(n, tuple((each,) for each in needs))
        for place in found:
            held = [shares(s, p)[c].size for s, p, c in zip(sizes, parts, place, strict=True)]
            others = math.prod(held[:axis]) * math.prod(held[axis + 1 :])
            found[place] += plans[place[axis]].sent * others
        sizes[axis] = m
    lead = value.shape[0] * value.shape[1] * value.element_size()
    return tuple(each * lead for each in found.values())


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
    grid, found = Grid(shape), {}
    pool = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.ReLU())
    networks: dict[str, nn.Module] = {"chain": chain(16), "u-net": UNet()}
    x = torch.randn(1, 2, 16, 24, 32)
    for name, network in (networks if len(shape) == 3 else {"overlapping pool": pool}).items():
        x = x if len(shape) == 3 else torch.randn(1, 2, 32, 64)
        alone = saved_bytes(copy.deepcopy(network), x)
        found[name] = alone, saved_bytes(spatialize(network, grid), grid.shard(x).clone())
    return found


@pytest.mark.parametrize("shape", [(1, 2), (1, 1, 2), (1, 2, 2)], ids=str)
def test_a_rank_keeps_its_share_of_what_one_process_keeps(shape: tuple[int, ...]) -> None:
    """No halos are among it: they are fetched again in the backward pass."""
    ranks = math.prod(shape)
    for found in run_shared(saved, ranks, shape):
        for name, (alone, mine) in found.items():
            assert mine <= 1.05 / ranks * alone, name


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


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
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
