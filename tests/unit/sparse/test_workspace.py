"""Shared scratch memory: what must not spoil results that pass through it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparsepipe.sparse import (
    BatchNorm,
    Conv3d,
    GlobalAvgPool,
    GlobalMaxPool,
    KernelSpec,
    MaxPool3d,
    ReLU,
    SparseTensor,
)
from sparsepipe.sparse.backends import convolution
from sparsepipe.sparse.backends.convolution import _Workspace
from tests.support.sparse_references import Case

CHANNELS = 6


def whole_network():
    return nn.Sequential(
        Conv3d(CHANNELS, 12),
        BatchNorm(12),
        ReLU(),
        MaxPool3d(2),
        Conv3d(12, 16, 3, stride=2),
        ReLU(),
        Conv3d(16, 8, bias=True),
        GlobalMaxPool(),
    )


NETWORKS = {
    "stride 2": lambda: Conv3d(CHANNELS, 8, 3, stride=2),
    "tiling pool": lambda: nn.Sequential(Conv3d(CHANNELS, 8), MaxPool3d(2)),
    "overlapping pool": lambda: nn.Sequential(Conv3d(CHANNELS, 8), MaxPool3d(3, stride=2)),
    "mean": lambda: nn.Sequential(Conv3d(CHANNELS, 8), GlobalAvgPool()),
    "network": whole_network,
}


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    monkeypatch.setattr(convolution, "_BLOCK_BYTES", 600)
    monkeypatch.setattr(convolution, "_MIN_BLOCK_ROWS", 16)


def batch(seed=0, extent=9):
    shape = (extent,) * 3
    return Case(shape, 2, 0.3, CHANNELS, 2, KernelSpec.of(3), seed=seed).tensor(torch.float32)


def step(net, x, call=None):
    """Output, input gradient and parameter gradients."""
    x = SparseTensor(
        x.feats.clone().requires_grad_(),
        x.coords,
        spatial_shape=x.spatial_shape,
        batch_size=x.batch_size,
    )
    out = (call or net)(x)
    out = out.feats if isinstance(out, SparseTensor) else out
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), [x.feats, *net.parameters()])


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(params=NETWORKS)
def net(request):
    torch.manual_seed(0)
    return NETWORKS[request.param]()


def test_a_larger_batch_in_between_changes_nothing(net):
    net.eval()  # running statistics stay
    before = step(net, batch())
    step(net, batch(seed=1, extent=14))
    assert_same_bits(before, step(net, batch()))


def test_threads_do_not_share_it(net):
    net.eval()
    xs = [batch(seed) for seed in range(8)]
    alone = [step(net, x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: step(net, x), xs))
    for one, other in zip(alone, together, strict=True):
        assert_same_bits(one, other)


def test_recomputation_in_the_backward_pass_gives_the_same_bits():
    torch.manual_seed(0)
    net = whole_network().eval()

    def recomputed(x):
        # Recomputation runs inside the backward of the layers above.
        middle = checkpoint(net[:4], x, use_reentrant=False)
        return checkpoint(net[4:], middle, use_reentrant=False)

    assert_same_bits(step(net, batch()), step(net, batch(), call=recomputed))


def test_scratch_memory_is_reused_and_follows_its_tensor():
    workspace, like = _Workspace(), torch.zeros(1, dtype=torch.float64)
    with torch.device("meta"):  # whatever the default device is
        first = workspace.take("a", (4, 3), like)
    assert first.device.type == "cpu"
    assert (first.shape, first.dtype) == ((4, 3), torch.float64)
    assert workspace.take("a", (2, 2), like).data_ptr() == first.data_ptr()
    assert workspace.take("b", (2, 2), like).data_ptr() != first.data_ptr()
