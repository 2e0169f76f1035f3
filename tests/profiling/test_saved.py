"""What a forward pass keeps, against a count around the whole network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sparsepipe.profiling.saved import saved_bytes

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
    found = saved_bytes(blocks(), [torch.randn(ROWS, WIDTH)])
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
    assert sum(saved_bytes(net, [x, x])) == kept_by_the_whole(net, x)


def test_batches_are_left_alone_and_averaged() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    batches = [torch.randn(rows, WIDTH) for rows in (10, 30)]
    before = [batch.clone() for batch in batches]
    assert saved_bytes(net, batches) == [0, 4 * 20 * WIDTH]
    assert all(torch.equal(a, b) for a, b in zip(batches, before, strict=True))
