"""Layers as modules: states, copies, weights of other libraries, small batches."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from sparsepipe.errors import ConfigError
from sparsepipe.sparse import (
    AvgPool3d,
    BatchNorm,
    Conv3d,
    ConvTranspose3d,
    Dropout,
    GlobalAvgPool,
    GlobalMaxPool,
    InstanceNorm,
    KernelSpec,
    LayerNorm,
    Linear,
    MaxPool3d,
    PerVoxel,
    ReLU,
    SparseTensor,
    SqueezeExcite,
    sparse_collate,
)
from tests.support.sparse_references import Case


def network():
    return nn.Sequential(
        Conv3d(3, 8, bias=True),
        BatchNorm(8),
        ReLU(),
        MaxPool3d(),
        Conv3d(8, 8, 3, stride=2),
        Linear(8, 6),
        Dropout(0.2),
        GlobalMaxPool(),
    )


@pytest.fixture
def x():
    return Case((8, 8, 8), 3, 0.2, 3, 2, KernelSpec.of(3), seed=0).tensor(torch.float32)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_networks_copy_and_pickle(x, clone):
    net = network().eval()
    assert torch.equal(clone(net)(x), net(x))


@pytest.mark.parametrize(
    "layer",
    [
        Conv3d(1, 4),
        Conv3d(6, 4),
        Conv3d(6, 4, 1),
        Conv3d(6, 4, 2, stride=2),
        Conv3d(6, 4, 3, stride=2),
        MaxPool3d(2),
        MaxPool3d(3, stride=2),
        AvgPool3d(3, stride=2),
        BatchNorm(6),
        ReLU(),
        Linear(6, 4),
        Dropout(0.5),
        GlobalMaxPool(),
        GlobalAvgPool(),
        ConvTranspose3d(6, 4, 2, stride=(1, 2, 1)),
        InstanceNorm(6),
        LayerNorm(6),
        SqueezeExcite(6),
    ],
    ids=str,
)
def test_a_tensor_first_used_for_inference_can_be_trained_on(layer):
    channels = 1 if isinstance(layer, Conv3d) and layer.in_channels == 1 else 6
    x = Case((8, 8, 8), 3, 0.2, channels, 2, KernelSpec.of(3), seed=0).tensor(torch.float32)
    x.stride = (1, 2, 1)
    with torch.inference_mode():
        layer(x)
    feats = x.feats.clone().requires_grad_()
    out = layer(x.replace_feats(feats))
    out = out.feats if isinstance(out, SparseTensor) else out
    out.pow(3).sum().backward()
    assert feats.grad.isfinite().all()
    assert feats.grad.any()


@pytest.mark.parametrize("kernel_shape", [(4, 5), (1, 4, 5)])
@pytest.mark.parametrize("bias_shape", [(5,), (1, 5)])
def test_weights_of_other_libraries_load(kernel_shape, bias_shape):
    kernel, bias = torch.randn(kernel_shape), torch.randn(bias_shape)
    state = {"0.kernel": kernel, "0.bias": bias}
    net = nn.Sequential(Conv3d(4, 5, 1, bias=True))
    net.load_state_dict(state)
    assert torch.equal(net[0].kernel[0], kernel.view(4, 5))
    assert torch.equal(net[0].bias, bias.view(5))
    assert state["0.kernel"] is kernel
    assert state["0.bias"] is bias


def test_kernel_order_is_x_fastest_cross_correlation():
    conv = Conv3d(1, 1)
    with torch.no_grad():
        conv.kernel.copy_(torch.arange(27.0).view(27, 1, 1))
    coords = torch.tensor([[0, 2, 2, 2], [0, 3, 2, 2], [0, 2, 3, 2], [0, 2, 2, 3]]).int()
    for neighbour, offset in ((1, 13 + 1), (2, 13 + 3), (3, 13 + 9)):
        feats = torch.zeros(4, 1)
        feats[neighbour] = 1
        y = conv(SparseTensor(feats, coords))
        assert y.feats[0].item() == offset


@pytest.mark.parametrize("kwargs", [{"stride": 0}, {"kernel_size": 0}, {"dilation": (1, 2)}])
def test_impossible_windows(kwargs):
    with pytest.raises(ConfigError, match="at least 1"):
        Conv3d(1, 1, **kwargs)


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (ReLU(), nn.ReLU()),
        (Linear(3, 2), nn.Linear(3, 2)),
        (BatchNorm(3), nn.BatchNorm1d(3)),
        (LayerNorm(3), nn.LayerNorm(3)),
        (PerVoxel(nn.PReLU(3)), nn.Sequential(OrderedDict(module=nn.PReLU(3)))),
    ],
)
def test_pointwise_layers_are_the_plain_ones(x, ours, plain):
    plain.load_state_dict(ours.state_dict())
    expected = plain(x.feats)
    assert torch.equal(ours(x).feats, expected)
    assert ours(x).cache is x.cache
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x.feats), plain(x.feats))


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_norm_of_a_batch_without_variance(rows):
    norm = BatchNorm(2)
    norm.running_mean.fill_(1.0)
    before = copy.deepcopy(norm.state_dict())
    feats = torch.full((rows, 2), 3.0, requires_grad=True)
    x = SparseTensor(feats, torch.zeros(rows, 4, dtype=torch.int32), batch_size=1)
    out = norm(x).feats
    torch.testing.assert_close(out, torch.full((rows, 2), 2.0))
    out.sum().backward()
    assert norm.weight.grad is not None
    assert feats.grad.shape == (rows, 2)
    assert all(torch.equal(before[k], v) for k, v in norm.state_dict().items())


def filled(channels, dtype=torch.float64):
    """Two samples of 3 x 4 x 5 voxels, rows shuffled."""
    return Case((3, 4, 5), 2, 1.0, channels, 2, KernelSpec.of(3), seed=3).tensor(dtype)


class DenseSqueezeExcite(nn.Module):
    def __init__(self, fc):
        super().__init__()
        self.fc = fc

    def forward(self, x):
        return x * self.fc(x.mean((2, 3, 4)))[..., None, None, None]


@pytest.mark.parametrize("kind", ["instance norm", "squeeze-excite"])
def test_layers_over_samples_are_those_of_dense_grids(kind):
    torch.manual_seed(0)
    ours = (InstanceNorm(6) if kind == "instance norm" else SqueezeExcite(6, reduction=2)).double()
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    dense = (
        DenseSqueezeExcite(ours.fc)
        if kind != "instance norm"
        else nn.InstanceNorm3d(6, affine=True)
    )
    dense.load_state_dict(ours.state_dict())
    dense = dense.double()
    x = filled(6)
    upstream = x.replace_feats(torch.randn_like(x.feats))
    results = []
    for call, layer in (
        (lambda feats: ours(x.replace_feats(feats)).dense(), ours),
        (lambda feats: dense(x.replace_feats(feats).dense()), dense),
    ):
        feats = x.feats.clone().requires_grad_()
        out = call(feats)
        leaves = [feats, *dict(sorted(layer.named_parameters())).values()]
        results.append([out, *torch.autograd.grad((out * upstream.dense()).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "layer", [InstanceNorm(2), SqueezeExcite(2), AvgPool3d(2), AvgPool3d(3, stride=2)], ids=str
)
def test_first_and_second_derivatives(layer):
    x = Case((3, 3, 3), 3, 0.3, 2, 2, KernelSpec.of(3), seed=1).tensor()
    layer = copy.deepcopy(layer).double()

    def call(feats):
        return layer(x.replace_feats(feats)).feats

    feats = x.feats.requires_grad_()
    assert torch.autograd.gradcheck(call, (feats,), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (feats,), fast_mode=True)


def test_instance_norm_in_16_bits_and_of_single_voxels():
    norm = InstanceNorm(6, affine=False)
    large = filled(6).feats * 100 + 5000  # squares beyond float16
    x = filled(6).replace_feats(large.half())
    expected = norm(x.replace_feats(x.feats.double())).feats
    torch.testing.assert_close(norm(x).feats.double(), expected, rtol=1e-3, atol=2e-3)
    coords = torch.tensor([[0, 0, 0, 0], [2, 1, 0, 0]], dtype=torch.int32)
    norm = InstanceNorm(6)
    nn.init.ones_(norm.bias)
    for rows in (0, 2):
        single = SparseTensor(torch.randn(rows, 6), coords[:rows], batch_size=3)
        assert torch.equal(norm(single).feats, torch.ones(rows, 6))


@pytest.mark.parametrize("rows", [0, 1])
def test_whole_network_on_almost_nothing(rows):
    net = network()
    coords = torch.tensor([[1, 4, 0, 7]], dtype=torch.int32)[:rows]
    feats = torch.ones(rows, 3, requires_grad=True)
    out = net(SparseTensor(feats, coords, spatial_shape=(8, 8, 8), batch_size=2))
    assert out.shape == (2, 6)
    assert not out[0].any()
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize(("pool", "reduce"), [(GlobalMaxPool(), "amax"), (GlobalAvgPool(), "mean")])
def test_global_pools_of_rows_in_any_order(pool, reduce):
    batch = torch.tensor([2, 0, 2, 0, 2, 3, 0])
    coords = torch.stack([batch, *[torch.arange(7)] * 3], dim=1).int()
    feats = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    out = pool(SparseTensor(feats, coords, batch_size=5))
    expected = torch.stack(
        [
            getattr(feats[batch == b], reduce)(0) if (batch == b).any() else feats.new_zeros(4)
            for b in range(5)
        ]
    )
    torch.testing.assert_close(out, expected)
    weights = torch.randn(5, 4, dtype=torch.float64)
    grad, reference = (torch.autograd.grad((y * weights).sum(), feats)[0] for y in (out, expected))
    torch.testing.assert_close(grad, reference)


def test_the_mean_of_many_rows_in_float16():
    coords = torch.cartesian_prod(*[torch.arange(41)] * 3)  # more than float16 can count
    feats = torch.full((len(coords), 1), 200.0, dtype=torch.float16)
    x = sparse_collate([(coords, feats)], spatial_shape=(41, 41, 41))
    assert GlobalAvgPool()(x).item() == 200


def test_global_max_gives_ties_to_the_first_row():
    feats = torch.tensor([[1.0], [5.0], [5.0]], requires_grad=True)
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2]], dtype=torch.int32)
    GlobalMaxPool()(SparseTensor(feats, coords)).sum().backward()
    assert feats.grad.flatten().tolist() == [0, 1, 0]


@pytest.mark.parametrize("pool", [GlobalMaxPool(), GlobalAvgPool()])
@pytest.mark.parametrize("batch_size", [0, 2])
def test_global_pools_of_nothing(pool, batch_size):
    feats = torch.zeros(0, 3, requires_grad=True)
    x = SparseTensor(feats, torch.zeros(0, 4, dtype=torch.int32), batch_size=batch_size)
    out = pool(x)
    assert out.shape == (batch_size, 3)
    assert not out.any()
    out.sum().backward()
    assert feats.grad.shape == (0, 3)
