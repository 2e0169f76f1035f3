"""Bytes of tensors alive, against layers whose temporaries are known."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsepipe import sparse
from sparsepipe.profiling.measure import measure
from sparsepipe.profiling.memory import Alive, layer_peaks
from tests.unit.profiling.test_measure import sparse_batch

ROWS, WIDTH = 50, 64
SIZE = 4 * ROWS * WIDTH
WEIGHTS = 4 * WIDTH * WIDTH


class Chain(nn.Module):
    """Products one after another, of which the last one is given."""

    def __init__(self, products: int) -> None:
        super().__init__()
        weights = [torch.randn(WIDTH, WIDTH) for _ in range(products)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def test_freed_memory_does_not_count() -> None:
    with Alive() as alive:
        there = torch.zeros(100)
        assert alive.bytes == 400
        view = there.view(10, 10).add_(1)
        del there
        assert alive.bytes == 400
        sums = (view + 1) * 2
        del view
        assert (alive.bytes, alive.peak_bytes) == (400, 1200)
        assert alive.restart() == 400
        del sums
    assert (alive.bytes, alive.peak_bytes) == (0, 400)


def test_products_keep_what_they_get() -> None:
    x = torch.randn(ROWS, WIDTH)
    # With a way back each product keeps its input, without only two are alive at a time.
    net = nn.Sequential(Chain(1), Chain(4))
    forward, backward = layer_peaks(net, [x])
    assert forward == [SIZE, 4 * SIZE]
    # Beside what it gave, and keeps, the first makes the gradient of its weights alone.
    assert backward[0] == SIZE + WEIGHTS
    # The second ends with the gradients of all weights and of what it got; before that, it has
    # beside the four products one of these and a gradient of the last but one.
    assert backward[1] >= max(SIZE + 4 * WEIGHTS + SIZE, 4 * SIZE + WEIGHTS + SIZE)
    assert backward[1] <= 4 * SIZE + 4 * WEIGHTS + 2 * SIZE
    assert all(p.grad is None for p in net.parameters())
    with torch.no_grad():
        assert layer_peaks(net, [x, x]) == ([SIZE, 2 * SIZE], [0, 0])


def test_a_profile_has_the_larger_of_both() -> None:
    x = torch.randn(ROWS, WIDTH)
    net = nn.Sequential(Chain(1), Chain(4))
    forward, backward = layer_peaks(net, [x])
    found = measure(net, [x], device=torch.device("cpu"), num_warmup=0, num_measured=1)
    assert [layer.peak_bytes for layer in found.layers] == list(map(max, forward, backward))


def test_layers_in_place_give_what_they_got() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.ReLU())
    assert layer_peaks(net, [torch.randn(ROWS, WIDTH)])[0] == [SIZE, 0, SIZE]


def test_a_sparse_convolution_needs_its_output_and_its_kernel_map() -> None:
    x = sparse_batch(0)
    net = nn.Sequential(sparse.Conv3d(1, 8, 3), sparse.Conv3d(8, 8, 3))
    first, second = layer_peaks(net, [x])[0]
    out = 4 * 8 * len(x)
    table = 27 * 4 * len(x)
    assert first >= out + table
    assert out <= second < first
