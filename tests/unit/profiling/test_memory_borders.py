"""What stages keep at their ends, by hand and against stages with minibatches in flight."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsepipe.models import sparse_vgg11_bn
from sparsepipe.partition.costs.layers import chain_spans
from sparsepipe.profiling import Profile
from sparsepipe.profiling.activations import fresh
from sparsepipe.profiling.measure import measure
from sparsepipe.profiling.memory import Alive, Kept, border_bytes, saved_bytes
from sparsepipe.runtime.stage import StageLayers
from tests.unit.profiling.test_measure import sparse_batch

ROWS, WIDTH = 20, 16
SIZE = 4 * ROWS * WIDTH
FLYING = 3


def test_dense_layers_by_hand() -> None:
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)
    )
    x = torch.randn(ROWS, WIDTH)
    # A linear layer keeps what it gets, which the sigmoid before it has kept as what it gives.
    assert saved_bytes(net, x) == [SIZE, SIZE, 0, SIZE]
    begins, ends = border_bytes(net, x)
    # The first layer keeps its input by itself; what sigmoid receives nobody needs, but it is
    # there; and a layer in place gives what it received.
    assert begins == [0, SIZE, SIZE, 0]
    assert ends == [SIZE, 0, SIZE, 0]


@pytest.fixture(scope="module")
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return sparse_vgg11_bn(10, width=0.25).train()


@pytest.fixture(scope="module")
def profile(net: nn.Sequential) -> Profile:
    return measure(net, [sparse_batch(0)], device=torch.device("cpu"), num_warmup=0, num_measured=1)


def test_passes_from_each_layer_to_the_end_give_the_same_bytes(net: nn.Sequential) -> None:
    layers = list(net)
    begins, _ = border_bytes(net, sparse_batch(0))
    whole = saved_bytes(net, sparse_batch(0))
    for first in range(len(layers)):
        # What the rest keeps by itself, and what it received as far as it keeps that not yet.
        rest = Kept(layers[first:], arrived(before(net, first)), received=True)
        assert begins[first] == max(0, sum(rest.sizes) - sum(whole[first:])), first


def test_layers_run_only_a_few_times(net: nn.Sequential) -> None:
    ran = 0

    def count(*_: object) -> None:
        nonlocal ran
        ran += 1

    hooks = [layer.register_forward_hook(count) for layer in net]
    border_bytes(net, sparse_batch(0))
    for hook in hooks:
        hook.remove()
    assert ran < 8 * len(net)  # to the end from each, a layer would run len(net) / 2 times


@pytest.mark.parametrize(("first", "last"), [(0, 9), (3, 12), (5, 16), (8, 14), (12, 30)])
def test_a_stage_with_minibatches_in_flight(
    net: nn.Sequential, profile: Profile, first: int, last: int
) -> None:
    stage, leaves = StageLayers(net, net, first=first, last=last), dict(net.named_parameters())
    received = [before(net, first) for _ in range(1 + FLYING)]
    flights = [stage.forward(received.pop(), minibatch=0, leaves=leaves)]  # workspaces are made
    with Alive() as alive:
        for number in range(FLYING):
            value = arrived(received.pop())
            flights.append(stage.forward(value, minibatch=number, leaves=leaves))
            del value
        gc.collect()
        kept = alive.bytes / FLYING
    told = chain_spans([profile]).stored_bytes(first, last + 1)
    assert told == pytest.approx(kept, rel=0.1)


def before(net: nn.Sequential, first: int) -> Any:
    """What the stage receives."""
    value: Any = sparse_batch(0)
    with torch.no_grad():
        for layer in list(net)[:first]:
            value = layer(value)
    return fresh(value)


def arrived(value: Any) -> Any:
    """In memory of its own, wanting a gradient if it is of another layer."""

    def of(leaf: Tensor) -> Tensor:
        wants = leaf.is_floating_point() and leaf.shape[1] > 1
        return leaf.clone().requires_grad_(wants)

    return pytree.tree_map(of, value)
