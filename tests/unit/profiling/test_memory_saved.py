"""What a forward pass keeps, against a count around the whole network."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sparsepipe import sparse
from sparsepipe.profiling.memory import heaviest, saved_bytes
from tests.unit.profiling.test_measure import sparse_batch

ROWS, WIDTH = 64, 128
SIZE = 4 * ROWS * WIDTH


def blocks() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Dropout(0.5)]
    return nn.Sequential(*layers)


def kept_by_the_whole(net: nn.Module, x: Tensor) -> int:
    """Bytes of all storages that the graph of one call holds, less those of the network."""
    own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    held: list[Tensor] = []  # while it is full, no address is given out twice

    def hold(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        return tensor.detach()

    with saved_tensors_hooks(hold, lambda tensor: tensor):
        output = net(x)
    assert output.requires_grad
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(size for place, size in sizes.items() if place not in own)


def test_layers_of_equal_size_by_hand() -> None:
    found = saved_bytes(blocks(), torch.randn(ROWS, WIDTH))
    # A linear layer keeps what it gets, a sigmoid what it gives, dropout its mask, a byte or a
    # float for each number.
    linear, sigmoid, dropout = found[::3], found[1::3], found[2::3]
    assert linear == [SIZE] * 4
    assert sigmoid == [SIZE] * 4
    assert all(SIZE / 4 <= size <= SIZE for size in dropout)


NETS = {
    "blocks": blocks,
    "in place": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        nn.Dropout(0.5, inplace=True),
        nn.Linear(WIDTH, 2),
    ),
    "norm": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Linear(WIDTH, 2)
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_the_sum_is_what_the_whole_network_keeps(name: str) -> None:
    net, x = NETS[name](), torch.randn(ROWS, WIDTH)
    assert sum(saved_bytes(net, x)) == kept_by_the_whole(net, x)


def test_batches_are_left_alone_and_the_largest_is_found() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    batches = [torch.randn(rows, WIDTH) for rows in (10, 30, 20)]
    before = [batch.clone() for batch in batches]
    assert heaviest(net, batches) is batches[1]
    assert saved_bytes(net, batches[1]) == [0, 4 * 30 * WIDTH]
    assert all(torch.equal(a, b) for a, b in zip(batches, before, strict=True))


def integers_alive() -> dict[int, Tensor]:
    """Integer tensors that Python can reach anywhere, by storage."""
    found = [x for x in gc.get_objects() if type(x) is Tensor and not x.is_floating_point()]
    return {t.untyped_storage().data_ptr(): t for t in found}


def test_kernel_maps_count_once_for_the_layer_that_builds_them() -> None:
    net = nn.Sequential(
        sparse.Conv3d(1, 32, 3),
        sparse.ReLU(),
        sparse.Conv3d(32, 32, 3),
        sparse.ReLU(),
        sparse.Conv3d(32, 32, 3),
        sparse.MaxPool3d(2),
    )
    x = sparse_batch(0)
    found = saved_bytes(net, x)
    before = integers_alive()
    held: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    with saved_tensors_hooks(hold, lambda tensor: tensor):
        output = net(x)
    # Whatever integers the forward pass has left in memory, but for the coordinates.
    after = {place: t for place, t in integers_alive().items() if place not in before}
    del after[output.coords.untyped_storage().data_ptr()]
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept = {place: t for place, t in {**held, **after}.items() if place not in own}
    assert sum(found) == sum(t.untyped_storage().nbytes() for t in kept.values())
    assert found[0] > 27 * len(x) * 4  # the table of neighbours
    assert found[2] > 0  # a wide kernel wants a plan of the same map
    assert found[4] == 0  # what it gets ReLU keeps, map and plan are there
    assert found[5] > 8 * len(output) * 4
