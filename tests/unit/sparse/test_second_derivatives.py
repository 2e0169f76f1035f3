"""Second derivatives of sparse layers, as gradient penalties take them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparsepipe.errors import BackendError
from sparsepipe.sparse import (
    Conv3d,
    GlobalAvgPool,
    GlobalMaxPool,
    KernelSpec,
    MaxPool3d,
    NativeBackend,
    SparseTensor,
)
from sparsepipe.sparse.backends.torchsparse import convolve
from tests.support.torchsparse_cases import scattered, weights
from tests.support.torchsparse_statement import statement


def sites(channels: int) -> SparseTensor:
    return scattered((4, 4, 4), channels=channels, share=0.3).to(torch.float64)


WINDOWS = {
    "submanifold": KernelSpec.of(3),
    "strided": KernelSpec.of(3, stride=2),
    "tiling": KernelSpec.of(2, stride=2),
    "pointwise": KernelSpec.of(1),
    "of many offsets": KernelSpec.of(5),
}


@pytest.mark.parametrize("channels", [2, 6], ids=["narrow", "wide"])
@pytest.mark.parametrize("window", WINDOWS)
def test_convolution(window: str, channels: int) -> None:
    x, spec = sites(channels), WINDOWS[window]
    draw = torch.Generator().manual_seed(3)
    kernel = torch.randn(spec.volume, channels, 2, generator=draw, dtype=torch.float64)

    def function(feats: Tensor, kernel_: Tensor) -> Tensor:
        return NativeBackend().conv3d(x.replace_feats(feats), kernel_, None, spec).feats

    inputs = (x.feats.requires_grad_(), kernel.requires_grad_())
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


POOLS: dict[str, Callable[[SparseTensor], Tensor]] = {
    "tiling": lambda x: MaxPool3d(2)(x).feats,
    "overlapping": lambda x: MaxPool3d(3, stride=2)(x).feats,
    "global maximum": GlobalMaxPool(),
    "global mean": GlobalAvgPool(),
}


@pytest.mark.parametrize("pool", POOLS)
def test_pooling(pool: str) -> None:
    x = sites(2)

    def function(feats: Tensor) -> Tensor:
        return POOLS[pool](x.replace_feats(feats.square()))

    assert torch.autograd.gradgradcheck(function, (x.feats.requires_grad_(),), fast_mode=True)


def test_a_gradient_penalty_trains_as_of_a_dense_network() -> None:
    """The gradient of the output's sum needs no gradient itself, and its graph counts as well."""
    torch.manual_seed(0)
    extent, share = (3, 4, 5), 1.1  # every cell has a site
    grid = scattered(extent, share=share).to(torch.float64)
    first, second = Conv3d(2, 5, 3).double(), Conv3d(5, 1, 3).double()
    dense = nn.Sequential(
        nn.Conv3d(2, 5, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Conv3d(5, 1, 3, padding=1, bias=False),
    ).double()
    for layer, like in ((dense[0], first), (dense[2], second)):
        kernel = like.kernel.detach().permute(2, 1, 0)  # x fastest: z, y, x
        shape = (*kernel.shape[:2], 3, 3, 3)
        layer.weight.data = kernel.reshape(shape).permute(0, 1, 4, 3, 2).clone()
    batch, x, y, z = grid.coords.long().unbind(1)
    feats = grid.feats.requires_grad_()
    hidden = first(grid.replace_feats(feats))
    out = second(hidden.replace_feats(hidden.feats.tanh())).feats.sum()
    (gradient,) = torch.autograd.grad(out, feats, create_graph=True)
    penalty = (gradient.square().sum(1) - 1).square().sum()
    penalty.backward()

    volume = torch.zeros(2, 2, *extent, dtype=torch.float64)
    volume[batch, :, x, y, z] = feats.detach()
    volume.requires_grad_()
    (expected,) = torch.autograd.grad(dense(volume).sum(), volume, create_graph=True)
    dense_penalty = (expected.square().sum(1) - 1).square().sum()
    dense_penalty.backward()
    torch.testing.assert_close(penalty, dense_penalty)
    for layer, like in ((dense[0], first), (dense[2], second)):
        found = like.kernel.grad
        assert found is not None
        wanted = layer.weight.grad.permute(0, 1, 4, 3, 2).flatten(2).permute(2, 1, 0)
        torch.testing.assert_close(found, wanted)


def test_torchsparse_refuses_them() -> None:
    x, spec = scattered(), KernelSpec.of(3)
    kernel, _ = weights(spec)
    feats = x.feats.requires_grad_()
    out = convolve(statement(), x.replace_feats(feats), kernel, None, spec)
    torch.autograd.grad(out.feats.sum(), feats, retain_graph=True)
    with pytest.raises(BackendError, match="no second derivative"):
        torch.autograd.grad(out.feats.sum(), feats, create_graph=True)
