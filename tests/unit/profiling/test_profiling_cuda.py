"""Profiles on a CUDA device: events against a wall clock, layers against steps, memory counted."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.models.vgg import sparse_vgg
from sparsepipe.profiling.measure import measure
from sparsepipe.profiling.memory import layer_peaks
from sparsepipe.profiling.passes import one_pass
from sparsepipe.profiling.timing import Clock
from tests.unit.profiling.test_measure import sparse_batch

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = 2048
ROWS, WIDTH = 512, 256
OUTPUT_BYTES = 4 * ROWS * WIDTH
"""Small enough that CUDA's allocator gives no more than is wanted."""
WORKSPACE_BYTES = 64 * 2**20
"""As much as cuBLAS may take for a moment."""


def work(products: int) -> Tensor:
    factor = torch.full((2 * SIZE, 2 * SIZE), 1e-3, device=DEVICE)
    for _ in range(products):
        product = factor @ factor
    return product


def test_events_tell_what_a_wall_clock_does_and_wait_for_nothing() -> None:
    work(5)
    clock = Clock(DEVICE)
    clock.synchronise()
    started_s = time.perf_counter()
    clock.mark()
    work(60)
    clock.mark()
    launched_s = time.perf_counter() - started_s
    (by_events_s,) = clock.seconds()
    by_wall_s = time.perf_counter() - started_s
    assert 0.5 * by_wall_s < by_events_s < by_wall_s + 1e-3
    assert launched_s < 0.5 * by_events_s
    assert clock.seconds() == []


def dense_net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(SIZE, SIZE) if n % 2 == 0 else nn.Tanh() for n in range(12)))


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_layers_take_as_long_as_a_step(name: str) -> None:
    if name == "dense":
        net, batches = dense_net(), [torch.randn(SIZE, SIZE) for _ in range(2)]
    else:
        net, batches = sparse_vgg(11, 10, width=0.25), [sparse_batch(seed) for seed in range(2)]
    net = net.to(DEVICE)
    found = measure(
        net,
        [batch.to(DEVICE) for batch in batches],
        device=DEVICE,
        num_warmup=3,
        num_measured=8,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    assert all(layer.forward_s > 0 for layer in found.layers)
    # Launching a sparse net's small kernels takes longer layer by layer.
    least, most = (0.3, 3) if name == "dense" else (0.2, 6)
    assert least < found.compute_s / found.meta["step_s"] < most
    assert found.update_s is not None
    assert 0 < found.update_s < 10 * found.meta["step_s"]
    if name == "dense":  # products of matrices take most of it, and two thirds are in the backward
        linear = [layer for layer in found.layers if layer.kind == "Linear"]
        assert sum(layer.compute_s for layer in linear) > 0.5 * found.compute_s
        assert all(layer.backward_s > layer.forward_s for layer in linear[1:])
    else:
        assert 0 < (found.layers[0].kernel_map_s or 0) <= found.layers[0].forward_s
        assert found.layers[0].peak_bytes > found.layers[0].activation_bytes


def test_memory_is_what_tensors_take() -> None:
    kinds = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Tanh()]
    net = nn.Sequential(*kinds).to(DEVICE)
    batch = torch.randn(ROWS, WIDTH, device=DEVICE)
    one_pass(net, batch, DEVICE, nullcontext)  # libraries take what they work in at the first
    before = torch.cuda.memory_allocated(DEVICE)
    found = one_pass(net, batch, DEVICE, nullcontext)
    assert torch.cuda.memory_allocated(DEVICE) <= before
    assert found.held_bytes == [OUTPUT_BYTES] * len(net)
    alive = [max(both) for both in zip(*layer_peaks(net, [batch]), strict=True)]
    for layer, peak_bytes, alive_bytes in zip(net, found.peak_bytes, alive, strict=True):
        if isinstance(layer, nn.Linear):
            assert alive_bytes <= peak_bytes <= alive_bytes + WORKSPACE_BYTES
        else:  # its output, and in the backward the gradient beside it
            assert peak_bytes == alive_bytes == 2 * OUTPUT_BYTES


def test_a_profile_has_the_peaks_that_a_device_counts() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh()).to(DEVICE)
    batch = torch.randn(ROWS, WIDTH, device=DEVICE)
    found = measure(net, [batch], device=DEVICE, num_warmup=1, num_measured=2)
    assert [layer.saved_bytes for layer in found.layers] == [OUTPUT_BYTES] * 3
    assert [layer.peak_bytes for layer in found.layers[1:]] == [2 * OUTPUT_BYTES] * 2
    weights_bytes = found.layers[0].parameter_bytes
    assert weights_bytes == 4 * (WIDTH * WIDTH + WIDTH)
    first = found.layers[0].peak_bytes
    assert (
        OUTPUT_BYTES + weights_bytes
        <= first
        <= 2 * OUTPUT_BYTES + 2 * weights_bytes + (WORKSPACE_BYTES)
    )
