"""What other libraries mean by the same layers: docs/backends.md tells of each difference.

spconv's layers for the CPU run where it is installed. MinkowskiEngine 0.5.4 and torchsparse 2.1.0,
which need a build, are stated site by site, as their sources have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsepipe.sparse import KernelSpec, SparseTensor
from sparsepipe.sparse.tensor import sparse_collate
from tests.support import spconv_unet
from tests.support.sparse_references import BACKEND, Case, relative_error, sites
from tests.support.torchsparse_statement import offset_list

Site = tuple[int, ...]


def numbered(x: SparseTensor) -> dict[Site, Tensor]:
    return dict(zip(map(tuple, x.coords.tolist()), x.feats, strict=True))


def floored(x: SparseTensor, stride: int) -> set[Site]:
    return {(b, *(v // stride for v in site)) for b, *site in x.coords.tolist()}


def minkowski(x: SparseTensor, kernel: Tensor, size: int, stride: int) -> dict[Site, Tensor]:
    """MinkowskiEngine divides coordinates for every size; x is fastest, even sizes start at 0."""
    before = size // 2 if size % 2 else 0
    feats, out = numbered(x), {}
    for b, *site in floored(x, stride):
        total = torch.zeros(kernel.shape[2], dtype=kernel.dtype)
        for k in range(size**3):
            offset = (k % size - before, k // size % size - before, k // size**2 - before)
            read = (b, *(v * stride + o for v, o in zip(site, offset, strict=True)))
            if read in feats:
                total = total + feats[read] @ kernel[k]
        out[(b, *site)] = total
    return out


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 1), (3, 2), (5, 2), (1, 2)])
def test_minkowski_engine_keeps_the_sites_of_divided_coordinates(size: int, stride: int) -> None:
    case = Case((6, 7, 8), 2, 0.15, 3, 4, KernelSpec.of(size, stride=stride), seed=2)
    x, kernel = case.tensor(), case.kernel()
    theirs = minkowski(x, kernel, size, stride)
    ours = numbered(BACKEND.conv3d(x, kernel, None, case.spec))
    equal_sites = {(2, 2): True, (3, 1): True}.get((size, stride), False)
    assert (set(ours) == set(theirs)) == equal_sites
    for site in set(ours) & set(theirs):
        torch.testing.assert_close(ours[site], theirs[site])
    if size > stride:  # theirs are some of ours: a window has more inputs than its own cell
        assert set(theirs) <= set(ours)


def test_minkowski_engine_goes_back_to_the_sites_of_the_stride_before() -> None:
    """Its transposed convolution takes kept sites of the finer stride, else all it reaches."""
    case = Case((6, 6, 6), 2, 0.15, 3, 4, KernelSpec.of(2, stride=2), seed=2)
    like, kernel = case.tensor(), torch.randn(8, 4, 3, dtype=torch.float64)
    x = BACKEND.conv3d(like, case.kernel(), None, case.spec)
    reached: dict[Site, Tensor] = {}
    for (b, *site), feats in numbered(x).items():
        for k in range(8):
            offset = (k % 2, k // 2 % 2, k // 4)
            reached[(b, *(2 * v + o for v, o in zip(site, offset, strict=True)))] = (
                feats @ kernel[k]
            )
    back = numbered(BACKEND.conv_transpose3d(x, kernel, None, case.spec, like=like))
    assert list(back) == [tuple(site) for site in like.coords.tolist()]
    x.stride = (2, 2, 2)
    made = numbered(BACKEND.conv_transpose3d(x, kernel, None, case.spec))
    assert list(made) == sorted(reached)
    for site, value in [*back.items(), *made.items()]:
        torch.testing.assert_close(value, reached[site])


@pytest.mark.parametrize(
    ("size", "stride", "padding", "is_equal"),
    [(2, 2, 0, True), (3, 2, 1, True), (3, 2, 0, False), (3, 3, 0, False), (3, 3, 1, False)],
)
def test_torchsparse_divides_coordinates_where_size_equals_stride(
    size: int, stride: int, padding: int, is_equal: bool
) -> None:
    case = Case((6, 7, 8), 2, 0.15, 1, 1, KernelSpec.of(size, stride=stride), seed=2)
    x = case.tensor()
    if size == stride:  # whatever the padding
        theirs = floored(x, stride)
    else:
        limits = [(e + 2 * padding - size) // stride + 1 for e in case.shape]
        theirs = {
            (b, *((v + padding - o) // stride for v, o in zip(site, offset, strict=True)))
            for b, *site in x.coords.tolist()
            for offset in torch.cartesian_prod(*[torch.arange(size)] * 3).tolist()
            if all(
                (v + padding - o) % stride == 0 and 0 <= (v + padding - o) // stride < limit
                for v, o, limit in zip(site, offset, limits, strict=True)
            )
        }
    ours = sites(BACKEND.conv3d(x, case.kernel(), None, case.spec).coords)
    assert (ours == theirs) == is_equal


@pytest.mark.parametrize("size", [(3, 3, 3), (2, 2, 2), (2, 3, 3), (1, 3, 5)])
def test_torchsparse_orders_offsets_of_even_volumes_with_z_fastest(size: tuple[int, ...]) -> None:
    ours = KernelSpec.of(size).offsets()
    assert (ours == offset_list(size)) == (math.prod(size) % 2 == 1)
    assert sorted(ours) == sorted(offset_list(size))


@pytest.fixture(name="spconv")
def _spconv() -> Any:
    return spconv_unet.spconv()


def spconv_layer(spconv: Any, kind: str, kernel: Tensor, size: int, **settings: Any) -> Any:
    """A layer of spconv with our kernel; its weights are [Cout, x, y, z, Cin]."""
    settings.setdefault("algo", spconv.ConvAlgo.Native)
    layer = getattr(spconv, kind)(*kernel.shape[1:], size, bias=False, **settings)
    by_axes = kernel.view(size, size, size, *kernel.shape[1:])
    layer.weight = torch.nn.Parameter(by_axes.permute(4, 2, 1, 0, 3).contiguous())
    return layer


def compare(
    spconv: Any,
    layers: Callable[[Any], Any],
    ours: Callable[[SparseTensor], SparseTensor],
    x: SparseTensor,
) -> None:
    """Compares sites, features and the gradient of features with those of spconv."""
    results = []
    for is_ours in (True, False):
        feats = x.feats.clone().requires_grad_()
        if is_ours:
            y = ours(x.replace_feats(feats))
            out, coords, shape = y.feats, y.coords, y.spatial_shape
        else:
            given = spconv.SparseConvTensor(feats, x.coords, list(x.cache.extent), x.batch_size)
            theirs = layers(given)
            out, coords, shape = theirs.features, theirs.indices, tuple(theirs.spatial_shape)
        order = sorted(range(len(coords)), key=coords.tolist().__getitem__)
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        (grad,) = torch.autograd.grad((out[order] * upstream).sum(), feats)
        results.append((coords[order], shape, out[order], grad))
    (coords, shape, *found), (their_coords, their_shape, *expected) = results
    assert (coords.tolist(), shape) == (their_coords.tolist(), their_shape)
    assert max(map(relative_error, found, expected)) < 1e-10


@pytest.mark.parametrize(
    ("kind", "size", "stride"),
    [("SubMConv3d", 3, 1), ("SparseConv3d", 2, 2), ("SparseConv3d", 3, 2), ("SparseConv3d", 5, 2)],
)
def test_convolutions_of_spconv(spconv: Any, kind: str, size: int, stride: int) -> None:
    case = Case((6, 8, 10), 2, 0.2, 3, 4, KernelSpec.of(size, stride=stride), seed=1)
    kernel, padding = case.kernel(), size // 2 if size % 2 else 0
    layer = spconv_layer(spconv, kind, kernel, size, stride=stride, padding=padding)
    compare(spconv, layer, lambda x: BACKEND.conv3d(x, kernel, None, case.spec), case.tensor())


@pytest.mark.parametrize(("size", "padding", "more"), [(2, 0, 0), (3, 1, 1), (5, 2, 1)])
def test_transposed_and_inverse_convolutions_of_spconv(
    spconv: Any, size: int, padding: int, more: int
) -> None:
    case = Case((6, 8, 10), 2, 0.2, 3, 4, KernelSpec.of(size, stride=2), seed=1)
    x, kernel = case.tensor(), case.kernel()
    x.stride = (2, 2, 2)
    settings = {"stride": 2, "padding": padding}
    layer = spconv_layer(spconv, "SparseConvTranspose3d", kernel, size, **settings)
    layer.output_padding = [more] * 3  # without it, spconv loses the last plane for odd sizes
    compare(spconv, layer, lambda x: BACKEND.conv_transpose3d(x, kernel, None, case.spec), x)

    back = torch.randn(size**3, 4, 3, dtype=torch.float64)
    down = spconv_layer(spconv, "SparseConv3d", kernel, size, indice_key="level", **settings)
    up = spconv_layer(spconv, "SparseInverseConv3d", back, size, indice_key="level")

    def ours(x: SparseTensor) -> SparseTensor:
        coarse = BACKEND.conv3d(x, kernel, None, case.spec)
        return BACKEND.conv_transpose3d(coarse, back, None, case.spec, like=x)

    compare(spconv, lambda y: up(down(y)), ours, case.tensor())


def test_spconv_drops_the_last_plane_of_an_odd_grid_for_size_2(spconv: Any) -> None:
    kernel = torch.ones(8, 1, 1)
    layer = spconv_layer(spconv, "SparseConv3d", kernel, 2, stride=2)
    coords = torch.tensor([[0, 0, 0], [4, 4, 4]])
    x = sparse_collate([(coords, torch.ones(2, 1))], spatial_shape=(5, 5, 5))
    theirs = layer(spconv.SparseConvTensor(x.feats, x.coords, [5, 5, 5], 1))
    assert theirs.indices.tolist() == [[0, 0, 0, 0]]
    ours = BACKEND.conv3d(x, kernel, None, KernelSpec.of(2, stride=2))
    assert ours.coords.tolist() == [[0, 0, 0, 0], [0, 2, 2, 2]]
