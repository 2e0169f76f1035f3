"""Transposed and inverse convolutions against dense transposed convolution in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse import (
    AvgPool3d,
    Conv3d,
    ConvTranspose3d,
    GlobalAvgPool,
    InverseConv3d,
    KernelSpec,
    SparseTensor,
    cat,
)
from sparsepipe.sparse.backends import convolution
from tests.support.sparse_references import BACKEND, Case, at_sites, cases, relative_error

DOWN = [
    KernelSpec.of(2, stride=2),
    KernelSpec.of(3, stride=2),
    KernelSpec.of((3, 2, 1), stride=(2, 2, 1)),
    KernelSpec.of(3, stride=2, dilation=2),
    KernelSpec.of(1, stride=2),
    KernelSpec.of(5, stride=3),
]
SAME = [KernelSpec.of(3), KernelSpec.of(2)]


def dense_transposed(dense: Tensor, kernel_KCD: Tensor, spec: KernelSpec) -> Tensor:
    """PyTorch's result on the grid of ``stride`` times the extent, cut off or padded to it."""
    x, y, z = spec.size
    weight = kernel_KCD.view(z, y, x, *kernel_KCD.shape[1:]).permute(3, 4, 2, 1, 0)
    out = F.conv_transpose3d(dense, weight, stride=spec.stride, dilation=spec.dilation)
    for axis, (extent, s, d, b) in enumerate(
        zip(dense.shape[2:], spec.stride, spec.dilation, spec.before, strict=True), 2
    ):
        out = out.narrow(axis, d * b, out.shape[axis] - d * b)
        padding = [0, 0] * (4 - axis) + [0, max(0, extent * s - out.shape[axis])]
        out = F.pad(out, padding).narrow(axis, 0, extent * s)
    return out


def errors(
    case: Case, kernel: Tensor, x: SparseTensor, like: SparseTensor | None
) -> tuple[SparseTensor, Tensor, float]:
    """The result on ``x``, the dense one, and the largest error of output and gradients."""
    feats, kernel = x.feats.clone().requires_grad_(), kernel.clone().requires_grad_()
    out = BACKEND.conv_transpose3d(x.replace_feats(feats), kernel, None, case.spec, like=like)
    upstream = torch.randn(out.feats.shape, dtype=torch.float64)
    found = out.feats, *torch.autograd.grad(out.feats, (feats, kernel), upstream)

    volume = x.dense().requires_grad_()
    wanted = dense_transposed(volume, kernel, case.spec)
    if like is not None and like.spatial_shape is not None:
        wanted = wanted[:, :, *(slice(0, size) for size in like.spatial_shape)]
    picked = at_sites(wanted, out.coords)
    grads = torch.autograd.grad(picked, (volume, kernel), upstream)
    expected = picked, at_sites(grads[0], x.coords), grads[1]
    return out, wanted, max(map(relative_error, found, expected))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(case=cases())
def test_transposed_convolution_and_gradients(case: Case) -> None:
    stride = tuple(6 * s for s in case.spec.stride)
    x = case.tensor()
    x = SparseTensor(
        x.feats, x.coords, stride=stride, spatial_shape=x.spatial_shape, batch_size=x.batch_size
    )
    out, wanted, error = errors(case, case.kernel(), x, None)
    assert error <= 1e-12
    assert (out.stride, out.spatial_shape) == ((6, 6, 6), tuple(wanted.shape[2:]))
    if not case.spec.is_submanifold:
        reached = dense_transposed(
            x.replace_feats(torch.ones(len(x), 1).double()).dense(),
            torch.ones(case.spec.volume, 1, 1).double(),
            case.spec,
        )
        assert torch.equal(out.coords, reached[:, 0].nonzero().int())
        assert out.check() is out


@pytest.mark.parametrize("spec", [*DOWN, *SAME], ids=str)
@pytest.mark.parametrize("channels", [2, 5])
@pytest.mark.parametrize("blocks", ["one block", "blocks"])
def test_inverse_convolution_to_the_sites_of_an_earlier_level(
    spec: KernelSpec, channels: int, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks == "blocks":
        monkeypatch.setattr(convolution, "_BLOCK_BYTES", 600)
        monkeypatch.setattr(convolution, "_MIN_BLOCK_ROWS", 4)
    case = Case((7, 6, 5), 3, 0.3, 4, channels, spec, seed=3)
    like = case.tensor()
    x = BACKEND.conv3d(like, case.kernel(), None, spec)
    back = torch.randn(spec.volume, channels, 6, dtype=torch.float64)
    out, _, error = errors(case, back, x, like)
    assert error <= 1e-12
    assert out.coords is like.coords
    # A process that received both has caches of its own, and computes the same bits.
    sent = [SparseTensor(t.feats, t.coords.clone(), stride=t.stride, batch_size=t.batch_size,
                         spatial_shape=t.spatial_shape) for t in (x, like)]  # fmt: skip
    again = BACKEND.conv_transpose3d(sent[0], back, None, spec, like=sent[1])
    assert torch.equal(again.feats, out.feats)


@pytest.mark.parametrize("spec", [DOWN[0], DOWN[1], *SAME], ids=str)
@pytest.mark.parametrize("to_like", [False, True])
@pytest.mark.parametrize("channels", [2, 5])
def test_first_and_second_derivatives(spec: KernelSpec, to_like: bool, channels: int) -> None:
    like = Case((4, 3, 4), 2, 0.3, 1, channels, spec, seed=1).tensor()
    x = BACKEND.conv3d(like, torch.randn(spec.volume, 1, channels).double(), None, spec)
    kernel = torch.randn(spec.volume, channels, 2, dtype=torch.float64)
    bias = torch.randn(2, dtype=torch.float64)

    def call(feats: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
        target = like if to_like else None
        y = x.replace_feats(feats)
        return BACKEND.conv_transpose3d(y, kernel, bias, spec, like=target).feats

    leaves = [each.detach().requires_grad_() for each in (x.feats, kernel, bias)]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.usefixtures("two_threads")
def test_two_runs_give_the_same_bits() -> None:
    like = Case((12, 12, 12), 2, 0.3, 8, 8, DOWN[1], seed=4).tensor(torch.float32)
    torch.manual_seed(0)
    down, up, wide = Conv3d(8, 16, 3, stride=2), InverseConv3d(16, 8, 3, stride=2), Conv3d(16, 4)

    def run() -> list[Tensor]:
        x = SparseTensor(like.feats, like.coords, spatial_shape=(12, 12, 12), batch_size=2)
        out = wide(cat([up(down(x), x), x])).feats
        return [out, *torch.autograd.grad(out.square().sum(), [down.kernel, up.kernel])]

    assert all(map(torch.equal, run(), run()))


def test_layers_keep_the_size_of_features_and_load_their_states() -> None:
    torch.manual_seed(0)
    layer = ConvTranspose3d(64, 64, 2, stride=2, bias=True)
    coords = torch.cartesian_prod(*[torch.arange(n) for n in (2, 6, 6, 6)]).int()
    x = SparseTensor(torch.randn(len(coords), 64), coords, stride=2, spatial_shape=(6, 6, 6))
    assert layer(x).feats.var().item() == pytest.approx(2, rel=0.1)
    inverse = InverseConv3d(64, 64, 2, stride=2, bias=True)
    inverse.load_state_dict(layer.state_dict())
    assert torch.equal(inverse(x, layer(x)).feats, layer(x).feats)


class TwoMethods:
    """What the protocol asks of a backend."""

    name = "own"

    def conv3d(self, *args: Any) -> SparseTensor:
        return BACKEND.conv3d(*args)

    def max_pool3d(self, *args: Any) -> SparseTensor:
        return BACKEND.max_pool3d(*args)


def test_a_backend_of_the_two_methods_alone_leaves_inverse_convolutions_to_the_default() -> None:
    like = Case((6, 6, 6), 2, 0.3, 3, 3, DOWN[0], seed=2).tensor(torch.float32)
    x = Conv3d(3, 3, 2, stride=2, backend=TwoMethods())(like)
    own, other = (
        InverseConv3d(3, 3, 2, stride=2, backend=backend) for backend in (TwoMethods(), BACKEND)
    )
    other.load_state_dict(own.state_dict())
    assert torch.equal(own(x, like).feats, other(x, like).feats)


class Doubling(TwoMethods):
    """Doubles what it computes itself."""

    def conv_transpose3d(self, *args: Any, **options: Any) -> SparseTensor:
        out = BACKEND.conv_transpose3d(*args, **options)
        return out.replace_feats(2 * out.feats)

    def avg_pool3d(self, *args: Any) -> SparseTensor:
        out = BACKEND.avg_pool3d(*args)
        return out.replace_feats(2 * out.feats)

    def global_avg_pool(self, *args: Any) -> Tensor:
        return 2 * BACKEND.global_avg_pool(*args)


@pytest.mark.parametrize(
    "make",
    [partial(ConvTranspose3d, 3, 3, 2), partial(AvgPool3d, 2), GlobalAvgPool],
)
def test_a_backend_s_own_methods_beyond_the_protocol_are_called(make: Any) -> None:
    x = Case((6, 6, 6), 2, 0.3, 3, 3, DOWN[0], seed=2).tensor(torch.float32)
    own, other = make(backend=Doubling()), make(backend=BACKEND)
    other.load_state_dict(own.state_dict())
    outs = [out if isinstance(out, Tensor) else out.feats for out in (own(x), other(x))]
    assert torch.equal(outs[0], 2 * outs[1])


def test_sites_that_do_not_belong_together_are_refused() -> None:
    case = Case((6, 6, 6), 2, 0.3, 3, 3, DOWN[0], seed=2)
    like = case.tensor(torch.float32)
    x = Conv3d(3, 3, 2, stride=2)(like)
    up = InverseConv3d(3, 3, 2, stride=2)
    assert up(x, like).coords is like.coords
    reversed_x = SparseTensor(
        x.feats, x.coords.flip(0), stride=2, spatial_shape=x.spatial_shape, batch_size=2
    )
    for other, target in ((like, like), (reversed_x, like), (x, x)):
        with pytest.raises(CoordinateError, match="not those to which a window of size"):
            up(other, target)
    with pytest.raises(CoordinateError, match="no level that is finer"):
        ConvTranspose3d(3, 3, 2, stride=2)(like)
    unknown = SparseTensor(x.feats, x.coords, stride=2, batch_size=2)
    with pytest.raises(CoordinateError, match="needs spatial_shape"):
        ConvTranspose3d(3, 3, 5, stride=2)(unknown)
    assert len(ConvTranspose3d(3, 3, 2, stride=2)(unknown)) == 8 * len(x)


def test_nothing_comes_of_nothing() -> None:
    for spec in (DOWN[0], DOWN[1]):
        like = SparseTensor(
            torch.ones(0, 3, requires_grad=True), torch.zeros(0, 4).int(),
            spatial_shape=(4, 4, 4), batch_size=2,
        )  # fmt: skip
        kernel = torch.ones(spec.volume, 3, 3, requires_grad=True)
        x = BACKEND.conv3d(like, kernel, None, spec)
        for target in (like, None):
            out = BACKEND.conv_transpose3d(x, kernel, None, spec, like=target)
            assert (len(out), out.spatial_shape) == (0, (4, 4, 4))
            grads = torch.autograd.grad(out.feats.sum(), (like.feats, kernel), retain_graph=True)
            assert not grads[1].any()
