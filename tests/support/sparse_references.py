"""Random sparse batches, windows that hypothesis draws, and dense references in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from sparsepipe.sparse import KernelSpec, NativeBackend, SparseTensor

BACKEND = NativeBackend()


@dataclass(frozen=True)
class Case:
    """A random sparse batch and a window."""

    shape: tuple[int, int, int]
    batch_size: int
    occupancy: float
    channels: int
    width: int
    spec: KernelSpec
    seed: int

    def tensor(self, dtype: torch.dtype = torch.float64) -> SparseTensor:
        """Normal features at random sites, rows shuffled."""
        generator = torch.Generator().manual_seed(self.seed)
        occupied = torch.rand(self.batch_size, *self.shape, generator=generator) < self.occupancy
        coords = occupied.nonzero().int()
        coords = coords[torch.randperm(len(coords), generator=generator)]
        feats = torch.randn(len(coords), self.channels, dtype=torch.float64, generator=generator)
        return SparseTensor(
            feats.to(dtype), coords, spatial_shape=self.shape, batch_size=self.batch_size
        )

    def kernel(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        size = (self.spec.volume, self.channels, self.width)
        return torch.randn(size, dtype=torch.float64, generator=generator).to(dtype)


def dense_kernel(kernel_KCD: torch.Tensor, spec: KernelSpec) -> torch.Tensor:
    """[K, C, D] with x fastest as PyTorch's [D, C, X, Y, Z]."""
    x, y, z = spec.size
    return kernel_KCD.view(z, y, x, *kernel_KCD.shape[1:]).permute(4, 3, 2, 1, 0)


def pad_dense(dense: torch.Tensor, spec: KernelSpec, value: float = 0.0) -> torch.Tensor:
    """Centred padding for odd sizes; otherwise what the last window needs on the right."""
    padding: list[int] = []
    axes = zip(dense.shape[2:], spec.size, spec.stride, spec.dilation, strict=True)
    for extent, size, stride, dilation in reversed(list(axes)):
        left = dilation * (size // 2) if size % 2 and spec.centred else 0
        last = (-(-extent // stride) - 1) * stride + dilation * (size - 1)
        padding += [left, max(0, last - left - (extent - 1))]
    return F.pad(dense, padding, value=value)


def dense_conv(dense: torch.Tensor, kernel_KCD: torch.Tensor, spec: KernelSpec) -> torch.Tensor:
    weight = dense_kernel(kernel_KCD, spec)
    padded = pad_dense(dense, spec)
    return F.conv3d(padded, weight, stride=spec.stride, dilation=spec.dilation)


def at_sites(dense_BCXYZ: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    b, x, y, z = coords.long().unbind(1)
    return dense_BCXYZ[b, :, x, y, z]


def run(case: Case, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Input, output, what is upstream, input gradient and kernel gradient of the convolution."""
    x = case.tensor(dtype).to(device)
    feats = x.feats.clone().requires_grad_()
    kernel = case.kernel(dtype).to(device).requires_grad_()
    y = BACKEND.conv3d(x.replace_feats(feats), kernel, None, case.spec)
    upstream = torch.randn(
        y.feats.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(case.seed)
    )
    grads = torch.autograd.grad(y.feats, (feats, kernel), upstream.to(y.feats))
    return x, y, upstream, *grads


def run_dense(case: Case, x: SparseTensor, y: SparseTensor, upstream: torch.Tensor) -> Any:
    """The same from a dense convolution in float64."""
    dense = case.tensor().dense().requires_grad_()
    kernel = case.kernel().requires_grad_()
    out = dense_conv(dense, kernel, case.spec)
    picked = at_sites(out, y.coords)
    grad_dense, grad_kernel = torch.autograd.grad(picked, (dense, kernel), upstream)
    return out, picked, at_sites(grad_dense, x.coords), grad_kernel


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm-wise; 0 for two zeros."""
    norm = float(reference.detach().norm())
    error = float((value.detach().double().to(reference.device) - reference.detach()).norm())
    return error / norm if norm else error


def compared(case: Case, dtype: torch.dtype, device: str = "cpu") -> Any:
    """Input, output, dense output, and the largest error of output and gradients, NaN if any is."""
    x, y, upstream, *gradients = run(case, dtype, device)
    out, *expected = run_dense(case, x.to("cpu"), y.to("cpu"), upstream)
    found = y.feats, *gradients
    assert {each.dtype for each in found} == {dtype}
    errors = list(map(relative_error, found, expected))
    return x, y, out, float(torch.tensor(errors, dtype=torch.float64).max())


def sites(coords: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(row) for row in coords.tolist()}


def same(a, b):
    """Whether two tensors have the same sites, features and grid."""
    return (
        torch.equal(a.feats, b.feats)
        and torch.equal(a.coords, b.coords)
        and (a.stride, a.spatial_shape, a.batch_size) == (b.stride, b.spatial_shape, b.batch_size)
    )


KERNEL_AND_STRIDE = [*((k, s) for k in (1, 2, 3, 5) for s in (1, 2)), (3, 3)]


@st.composite
def cases(draw: st.DrawFn, *, pooling: bool = False) -> Case:
    """Windows of every kind on small grids, empty and full ones among them."""
    axes = [draw(st.sampled_from(KERNEL_AND_STRIDE)) for _ in range(3)]
    if draw(st.booleans()):
        axes = [axes[0]] * 3
    size, stride = zip(*axes, strict=True)
    dilation = draw(st.sampled_from([1, 1, 2, 3]))
    return Case(
        shape=(draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 9))),
        batch_size=draw(st.integers(1, 3)),
        occupancy=draw(st.sampled_from([0.0, 0.03, 0.2, 0.6, 1.0])),
        channels=draw(st.sampled_from([1, 3, 5, 8])),
        width=draw(st.sampled_from([1, 4, 6])),
        spec=KernelSpec.for_pooling(size, stride=stride)
        if pooling
        else KernelSpec.of(size, stride=stride, dilation=dilation),
        seed=draw(st.integers(0, 2**20)),
    )
