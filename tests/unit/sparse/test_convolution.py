"""Convolution against dense convolution in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from sparsepipe.errors import BackendError
from sparsepipe.sparse import Conv3d, KernelSpec, SparseTensor
from sparsepipe.sparse.backends import convolution
from tests.support.sparse_references import (
    BACKEND,
    Case,
    cases,
    compared,
    dense_kernel,
    relative_error,
    run,
)


@pytest.fixture(params=["one block", "blocks"])
def block_bytes(request, monkeypatch):
    # Small enough that even these grids are walked in several blocks of rows.
    if request.param == "blocks":
        monkeypatch.setattr(convolution, "_BLOCK_BYTES", 600)
        monkeypatch.setattr(convolution, "_MIN_BLOCK_ROWS", 4)
    return request.param


@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases())
def test_matches_dense_convolution(case):
    _, y, out, error = compared(case, torch.float32)
    assert y.spatial_shape == tuple(out.shape[2:])
    assert error <= 1e-5


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("channels", [1, 7])
def test_every_window_in_one_block_and_in_several(size, stride, dilation, channels, block_bytes):
    spec = KernelSpec.of(size, stride=stride, dilation=dilation)
    case = Case((9, 7, 8), 3, 0.25, channels, 6, spec, seed=5)
    x, _, _, error = compared(case, torch.float64)
    assert error <= 1e-13
    if block_bytes == "blocks" and size in {2, 3} and channels > 1:
        kernel_map = x.cache.kernel_map(spec)
        rows = convolution._block_rows(kernel_map, case.kernel())
        assert len(kernel_map.gather_plan(rows)) > 1


@pytest.mark.parametrize("size", [3, 5, (3, 1, 1), (3, 2, 2), (3, 2, 1)])
def test_a_stride_equal_to_an_odd_size_keeps_windows_centred(size):
    case = Case((8, 9, 7), 2, 0.3, 6, 5, KernelSpec.of(size, stride=size), seed=3)
    x, _, out, error = compared(case, torch.float64)
    assert error <= 1e-13
    if size in {3, 5}:
        plain = F.conv3d(
            x.dense(), dense_kernel(case.kernel(), case.spec), stride=size, padding=size // 2
        )
        assert torch.equal(out[..., : plain.shape[2], : plain.shape[3], : plain.shape[4]], plain)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [2, 5])
def test_gradcheck(size, stride, channels):
    spec = KernelSpec.of(size, stride=stride)
    case = Case((4, 3, 4), 2, 0.3, channels, 3, spec, seed=1)
    x = case.tensor()
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def call(feats, kernel, bias):
        return BACKEND.conv3d(x.replace_feats(feats), kernel, bias, spec).feats

    inputs = (x.feats.clone().requires_grad_(), case.kernel().requires_grad_(), bias)
    assert torch.autograd.gradcheck(call, inputs)


def test_blocks_without_pairs(monkeypatch):
    monkeypatch.setattr(convolution, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(convolution, "_MIN_BLOCK_ROWS", 4)
    # With stride 2 a window of one voxel reads even sites only: the first ones here.
    coords = torch.zeros(40, 4, dtype=torch.int32)
    coords[:, 1] = torch.tensor([*range(0, 40, 2), *range(1, 40, 2)])
    feats = torch.randn(40, 6, requires_grad=True)
    kernel = torch.randn(1, 6, 3, requires_grad=True)
    spec = KernelSpec.of(1, stride=2)
    x = SparseTensor(feats, coords, spatial_shape=(40, 1, 1))
    y = BACKEND.conv3d(x, kernel, None, spec)
    plan = x.cache.kernel_map(spec).scatter_plan(4)
    assert [block.num_pairs for block in plan] == [4] * 5 + [0] * 5
    torch.testing.assert_close(y.feats, feats[:20] @ kernel[0])
    y.feats.sum().backward()
    torch.testing.assert_close(feats.grad[:20], kernel.detach()[0].sum(1).expand(20, 6))
    assert not feats.grad[20:].any()


def test_only_the_required_gradients():
    spec = KernelSpec.of(3)
    case = Case((6, 6, 6), 2, 0.3, 5, 4, spec, seed=2)
    x, kernel = case.tensor(), case.kernel().requires_grad_()
    BACKEND.conv3d(x, kernel, None, spec).feats.sum().backward()
    both = run(case, torch.float64)
    assert kernel.grad is not None
    assert x.feats.grad is None
    feats = x.feats.clone().requires_grad_()
    y = BACKEND.conv3d(x.replace_feats(feats), kernel.detach(), None, spec)
    (grad,) = torch.autograd.grad(y.feats, feats, both[2])
    assert torch.equal(grad, both[3])


@pytest.mark.parametrize("channels", [1, 16])
@pytest.mark.usefixtures("two_threads")
def test_two_runs_give_the_same_bits(channels):
    case = Case((12, 12, 12), 2, 0.3, channels, 24, KernelSpec.of(3), seed=4)
    first, second = run(case, torch.float32), run(case, torch.float32)
    for a, b in zip((first[1].feats, *first[2:]), (second[1].feats, *second[2:]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 16])
def test_half_precision_is_close(dtype, channels):
    case = Case((8, 8, 8), 2, 0.3, channels, 8, KernelSpec.of(3), seed=6)
    assert compared(case, dtype)[-1] < 0.02


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("spec", [KernelSpec.of(3), KernelSpec.of(2, stride=2)])
def test_the_kernels_gradient_is_as_exact_in_many_blocks_as_in_one(dtype, spec, monkeypatch):
    case = Case((16, 16, 16), 4, 0.5, 8, 8, spec, seed=10)
    errors = []
    for least_rows in (10**6, 8):
        monkeypatch.setattr(convolution, "_BLOCK_BYTES", 1)
        monkeypatch.setattr(convolution, "_MIN_BLOCK_ROWS", least_rows)
        x, _, upstream, _, grad_kernel = run(case, dtype)
        # The reference starts from the same rounded operands: only sums differ.
        kernel = case.kernel().requires_grad_()
        feats = x.replace_feats(x.feats.double())
        out = BACKEND.conv3d(feats, kernel, None, spec).feats
        (expected,) = torch.autograd.grad(out, kernel, upstream.to(dtype).double())
        errors.append(relative_error(grad_kernel, expected))
        assert grad_kernel.dtype == dtype
    assert errors[1] < 2 * errors[0]


def test_a_sample_without_sites_and_a_batch_without_any():
    conv = Conv3d(2, 3, bias=True)
    down = Conv3d(3, 4, 3, stride=2)
    coords = torch.tensor([[2, 0, 0, 0]], dtype=torch.int32)
    for rows in (0, 1):
        feats = torch.ones(rows, 2, requires_grad=True)
        x = SparseTensor(feats, coords[:rows], spatial_shape=(4, 4, 4), batch_size=4)
        y = down(conv(x))
        assert y.feats.shape == (rows, 4)
        assert y.batch_size == 4
        y.feats.sum().backward()
        assert feats.grad.shape == (rows, 2)
        assert torch.isfinite(conv.kernel.grad).all()


def test_operands_that_do_not_fit():
    case = Case((4, 4, 4), 1, 0.5, 3, 2, KernelSpec.of(3), seed=8)
    x = case.tensor()
    with pytest.raises(BackendError, match=r"\[27, 3, out_channels\]"):
        BACKEND.conv3d(x, torch.zeros(27, 4, 2).double(), None, case.spec)
    with pytest.raises(BackendError, match=r"but the kernel is.*\n.*autocast"):
        BACKEND.conv3d(x, torch.zeros(27, 3, 2), None, case.spec)
