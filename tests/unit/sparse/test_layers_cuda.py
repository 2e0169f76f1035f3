"""Every kind of layer on a CUDA device: the CPU's values in float64, and always the same bits."""

import copy

import pytest
import torch

from sparsepipe.models.resnet import sparse_resnet
from sparsepipe.sparse import (
    BatchNorm,
    Conv3d,
    Dropout,
    GlobalAvgPool,
    GlobalMaxPool,
    KernelSpec,
    Linear,
    MaxPool3d,
    ReLU,
    SparseTensor,
)
from tests.support.sparse_references import Case, relative_error

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def batch(channels):
    return Case((16, 16, 16), 3, 0.1, channels, 2, KernelSpec.of(3), seed=0).tensor()


def trained(layer, x, *, device, dtype):
    """Coordinates and features that a layer gives, all gradients, and its buffers afterwards."""
    layer = copy.deepcopy(layer).to(device, dtype)
    x = x.to(device).to(dtype)
    feats = x.feats.clone().requires_grad_()
    out = layer(x.replace_feats(feats))
    coords, value = (out.coords, out.feats) if isinstance(out, SparseTensor) else (None, out)
    upstream = torch.randn(
        value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    gradients = torch.autograd.grad(value, (feats, *layer.parameters()), upstream.to(value))
    return coords, [value.detach(), *gradients, *layer.buffers()]


@pytest.mark.parametrize(
    "layer",
    [
        Conv3d(1, 8),
        Conv3d(6, 4, bias=True),
        Conv3d(6, 4, 1),
        Conv3d(6, 4, 2),
        Conv3d(6, 4, 2, stride=2),
        Conv3d(6, 4, 3, stride=2),
        Conv3d(6, 4, 3, stride=3),
        Conv3d(6, 4, 3, dilation=2),
        Conv3d(6, 4, (3, 1, 5), stride=(1, 1, 2)),
        MaxPool3d(2),
        MaxPool3d(3, stride=2),
        BatchNorm(6),
        ReLU(),
        Linear(6, 4),
        GlobalMaxPool(),
        GlobalAvgPool(),
    ],
    ids=str,
)
def test_a_layer_gives_what_it_gives_on_a_cpu_and_repeats_its_bits(layer):
    x = batch(channels=1 if isinstance(layer, Conv3d) and layer.in_channels == 1 else 6)
    coords, expected = trained(layer, x, device="cpu", dtype=torch.float64)
    (one_coords, one), (_, two) = (
        trained(layer, x, device=DEVICE, dtype=torch.float32) for _ in range(2)
    )
    assert (one_coords is None) == (coords is None)
    assert coords is None or torch.equal(one_coords.cpu(), coords)
    for a, b, reference in zip(one, two, expected, strict=True):
        assert a.device.type == DEVICE
        assert torch.equal(a, b)
        assert relative_error(a, reference.double()) < 1e-5


def test_a_network_repeats_its_bits():
    torch.manual_seed(0)
    network, x = sparse_resnet(18, 4, width=1 / 8), batch(channels=1)
    one, two = (trained(network, x, device=DEVICE, dtype=torch.float32)[1] for _ in range(2))
    assert len(one) > 20
    assert all(map(torch.equal, one, two))


def test_dropout_draws_on_the_device():
    x = batch(channels=6).to(DEVICE)
    ones = x.replace_feats(torch.ones_like(x.feats))
    drop = Dropout(0.25)
    torch.manual_seed(3)
    one = drop(ones).feats
    torch.manual_seed(3)
    assert torch.equal(drop(ones).feats, one)
    assert not torch.equal(drop(ones).feats, one)
    assert one.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (one == 0).double().mean().item() == pytest.approx(0.25, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_in_its_dtype_and_keeps_float32_gradients(dtype):
    conv = Conv3d(6, 8, bias=True).to(DEVICE)
    x = batch(channels=6).to(DEVICE).to(torch.float32)
    with torch.autocast(DEVICE, dtype):
        y = conv(x)
    assert y.feats.dtype == dtype
    y.feats.float().sum().backward()
    assert conv.kernel.grad.dtype == torch.float32
    assert relative_error(y.feats, conv(x).feats.detach().double()) < 0.02
