"""Pooling against dense pooling: the largest and its gradients exactly, the mean closely."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from sparsepipe.sparse import KernelSpec, MaxPool3d, NativeBackend, SparseTensor
from tests.support.sparse_references import Case, at_sites, cases, pad_dense

BACKEND = NativeBackend()


def with_minus_infinity(x):
    """Dense grid with -inf at empty sites."""
    occupied = x.replace_feats(torch.ones_like(x.feats)).dense() > 0
    return x.dense().masked_fill(~occupied, -torch.inf)


def check(x, spec):
    feats = x.feats.clone().requires_grad_()
    y = BACKEND.max_pool3d(x.replace_feats(feats), spec)
    dense = with_minus_infinity(x).requires_grad_()
    padded = pad_dense(dense, spec, -torch.inf)
    picked = at_sites(F.max_pool3d(padded, spec.size, spec.stride), y.coords)
    assert torch.equal(y.feats, picked)
    upstream = torch.randint(1, 9, picked.shape).to(picked.dtype)  # sums without rounding
    (grad,) = torch.autograd.grad(y.feats, feats, upstream)
    (expected,) = torch.autograd.grad(picked, dense, upstream)
    assert torch.equal(grad, at_sites(expected, x.coords))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases(pooling=True))
def test_matches_dense_pooling(case):
    check(case.tensor(), case.spec)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_go_to_the_first_as_in_a_dense_pool(size, stride, dtype):
    spec = KernelSpec.for_pooling(size, stride=stride)
    x = Case((8, 7, 9), 2, 0.5, 4, 1, spec, seed=1).tensor(dtype)
    check(x.replace_feats(x.feats.round().clamp(min=0)), spec)


def test_pooling_by_an_odd_size_tiles_the_grid_as_a_dense_pool_does():
    x = Case((7, 8, 9), 2, 0.4, 3, 1, KernelSpec.of(3), seed=1).tensor()
    y = MaxPool3d(3)(x)
    dense = F.max_pool3d(with_minus_infinity(x), 3, ceil_mode=True)
    assert torch.equal(y.feats, at_sites(dense, y.coords))
    assert len(y) == int(dense[:, 0].isfinite().sum())


@pytest.mark.parametrize("stride", [1, 2])
def test_gradcheck(stride):
    x = Case((4, 4, 4), 2, 0.4, 2, 1, KernelSpec.of(2, stride=stride), seed=2).tensor()
    spec = KernelSpec.of(2, stride=stride)
    assert torch.autograd.gradcheck(
        lambda feats: BACKEND.max_pool3d(x.replace_feats(feats), spec).feats,
        x.feats.clone().requires_grad_(),
    )


def test_not_a_number_is_passed_on():
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.int32)
    feats = torch.tensor([[torch.nan], [1.0]])
    for rows in (feats, feats.flip(0)):
        assert MaxPool3d(2)(SparseTensor(rows, coords)).feats.isnan().all()


def test_empty_tensor():
    feats = torch.zeros(0, 3, requires_grad=True)
    coords = torch.zeros(0, 4, dtype=torch.int32)
    x = SparseTensor(feats, coords, batch_size=2, spatial_shape=(4, 4, 4))
    y = MaxPool3d(3, stride=2)(MaxPool3d(2)(x))
    assert y.feats.shape == (0, 3)
    y.feats.sum().backward()
    assert feats.grad.shape == (0, 3)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(case=cases(pooling=True))
def test_average_pooling_is_the_mean_of_occupied_voxels(case):
    x, spec = case.tensor(torch.float64), case.spec
    feats = x.feats.clone().requires_grad_()
    y = BACKEND.avg_pool3d(x.replace_feats(feats), spec)
    sums, counts = (
        F.avg_pool3d(pad_dense(x.replace_feats(each).dense(), spec, 0.0), spec.size, spec.stride)
        for each in (feats, torch.ones_like(feats))
    )
    expected = at_sites(sums / counts, y.coords)
    torch.testing.assert_close(y.feats, expected)
    upstream = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    for found, wanted in zip(
        *(torch.autograd.grad(each, feats, upstream) for each in (y.feats, expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted)
