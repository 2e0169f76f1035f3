"""Checks, keys, the two ways of searching, and what is kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse import (
    Conv3d,
    CoordinateCache,
    GlobalMaxPool,
    MaxPool3d,
    SparseTensor,
    kernel_map,
    sparse_collate,
)
from sparsepipe.sparse.coordinates import MAX_COORDINATE, coords_of_keys, linear_keys
from tests.support.sparse_references import cases


def tensor(rows, **kwargs):
    coords = torch.tensor(rows, dtype=torch.int32).view(-1, 4)
    return SparseTensor(torch.ones(len(coords), 2), coords, **kwargs)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(case=cases())
def test_table_and_sort_find_the_same(case):
    x = case.tensor()
    table, search = (
        CoordinateCache(
            x.coords, batch_size=x.batch_size, spatial_shape=x.spatial_shape, index_method=method
        ).kernel_map(case.spec)
        for method in ("table", "sort")
    )
    assert torch.equal(table.neighbours_KM, search.neighbours_KM)
    assert (table.output is None) == (search.output is None) == case.spec.is_submanifold
    if table.output is not None:
        assert torch.equal(table.output.coords_N4, search.output.coords_N4)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    extent=st.tuples(*[st.integers(1, 2**21)] * 3),
    seed=st.integers(0, 1000),
)
def test_keys_invert_and_keep_the_order(extent, seed):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, n, (20,), generator=generator) for n in (1, *extent)]
    coords = torch.stack(columns, dim=1).int().unique(dim=0)
    keys = linear_keys(coords, extent)
    assert torch.equal(coords_of_keys(keys, extent), coords)
    assert (keys[1:] > keys[:-1]).all()


def test_the_far_corner_of_the_largest_grid():
    far = MAX_COORDINATE
    rows = [[0, far, far, far], [0, far, far, far - 1], [0, 0, 0, 0]]
    x = tensor(rows, spatial_shape=(far + 1,) * 3)
    neighbours = x.cache.kernel_map(Conv3d(2, 2).spec).neighbours_KM
    assert (neighbours >= 0).sum(0).tolist() == [2, 2, 1]
    pooled = MaxPool3d(2)(x)
    assert pooled.coords.tolist() == [[0, 0, 0, 0], [0, far // 2, far // 2, far // 2]]


@pytest.mark.parametrize("method", ["table", "sort"])
@pytest.mark.parametrize("layer", [Conv3d(2, 2), MaxPool3d(2), Conv3d(2, 2, 3, stride=2)])
def test_duplicates_are_named(method, layer):
    x = tensor([[0, 1, 1, 1], [0, 5, 6, 7], [0, 2, 2, 2], [0, 5, 6, 7], [0, 1, 1, 1]])
    x.cache.index_method = method
    with pytest.raises(CoordinateError, match=r"rows 1 and 3 .* \(0, 5, 6, 7\)") as caught:
        layer(x)
    assert "torch.unique" in caught.value.remedy
    with pytest.raises(CoordinateError, match="rows 1 and 3"):
        layer(x)  # a failed check is not taken for a passed one


@pytest.mark.parametrize(
    ("rows", "kwargs", "message", "remedy"),
    [
        ([[0, 0, 0, -7]], {}, "z coordinates go from -7", "shift"),
        ([[0, 0, 2**21, 0]], {}, "y coordinates go from 2097152", "larger voxels"),
        ([[0, 8, 0, 0]], {"spatial_shape": (8, 8, 8)}, "x coordinate 8 is outside", "shape"),
        ([[3, 0, 0, 0]], {"batch_size": 3}, "3 is outside a batch of size 3", "batch-last"),
        (
            [[0, 0, 0, 0]],
            {"spatial_shape": (2**21 + 1, 1, 1)},
            "needs keys of more than 63 bits",
            "tighter spatial_shape",
        ),
    ],
)
def test_out_of_range(rows, kwargs, message, remedy):
    x = tensor(rows, **kwargs)
    for use in (
        Conv3d(2, 2),
        MaxPool3d(2),
        GlobalMaxPool(),
        SparseTensor.check,
        SparseTensor.dense,
    ):
        with pytest.raises(CoordinateError) as caught:
            use(tensor(rows, **kwargs))
        assert message in caught.value.message
        assert remedy in caught.value.remedy
    with pytest.raises(CoordinateError):
        x.check()


@pytest.mark.parametrize(
    ("feats", "coords"),
    [
        (torch.ones(2, 1), torch.zeros(2, 4)),
        (torch.ones(3, 1), torch.zeros(2, 4, dtype=torch.int32)),
        (torch.ones(2, 1).long(), torch.zeros(2, 4, dtype=torch.int32)),
    ],
)
def test_wrong_shape_or_dtype(feats, coords):
    with pytest.raises(CoordinateError, match="remedy"):
        SparseTensor(feats, coords)


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.zeros(2, 3), torch.ones(2, 1))],
        [(torch.zeros(2, 3).int(), torch.ones(3, 1))],
        [(torch.full((1, 3), -1), torch.ones(1, 1))],
        [(torch.full((1, 3), 2**33), torch.ones(1, 1))],
    ],
)
def test_samples_that_cannot_be_collated(samples):
    with pytest.raises(CoordinateError):
        sparse_collate(samples, spatial_shape=None)


def test_maps_are_built_once_for_each_level_and_window(monkeypatch):
    built = []
    build = kernel_map.build_kernel_map

    def counting(level, spec):
        built.append((len(level.coords_N4), spec))
        return build(level, spec)

    monkeypatch.setattr(kernel_map, "build_kernel_map", counting)
    occupied = torch.rand(2, 16, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.1
    coords = occupied.nonzero().int()
    x = SparseTensor(torch.ones(len(coords), 1), coords, spatial_shape=(16, 16, 16))
    net = torch.nn.Sequential(
        Conv3d(1, 2),
        Conv3d(2, 2),
        MaxPool3d(),
        Conv3d(2, 2),
        Conv3d(2, 2),
        MaxPool3d(),
        Conv3d(2, 2),
    )
    first = net(x)
    assert len(built) == 5
    assert len(set(built)) == 5
    second = net(x.replace_feats(2 * x.feats))
    assert len(built) == 5
    assert second.coords is first.coords
    # Another branch that downsamples the same level meets the same coarse level.
    branch = Conv3d(1, 3, 2, stride=2)(x)
    assert len(built) == 5
    assert branch.cache is MaxPool3d()(x).cache
    Conv3d(1, 3, 3, dilation=2)(x)
    assert len(built) == 6
