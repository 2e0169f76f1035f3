"""The tensor as a value: trees, pickles, devices, dense grids, batches."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from sparsepipe.errors import ConfigError, CoordinateError
from sparsepipe.sparse import Conv3d, KernelSpec, SparseTensor, sparse_collate
from tests.support.sparse_references import Case, same


@pytest.fixture
def x():
    return Case((5, 6, 7), 3, 0.3, 4, 2, KernelSpec.of(3), seed=0).tensor(torch.float32)


def test_is_a_tree_of_features_and_coordinates(x):
    Conv3d(4, 2)(x)
    leaves, spec = pytree.tree_flatten({"x": x, "y": [x.feats]})
    assert [leaf is own for leaf, own in zip(leaves, (x.feats, x.coords, x.feats), strict=True)]
    again = pytree.tree_unflatten(leaves, spec)["x"]
    assert same(again, x)
    assert again.cache is not x.cache
    assert not again.cache._maps


def test_tree_map_may_put_anything_in_place(x):
    shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), x)
    assert shapes.feats == tuple(x.feats.shape)
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(x)[0]]
    assert names == [".feats", ".coords"]


@pytest.mark.parametrize("clone", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_copies_leave_the_cache_behind(x, clone):
    Conv3d(4, 2)(x)
    other = clone(x)
    assert same(other, x)
    assert other.feats is not x.feats
    assert not other.cache._maps


def test_to_changes_the_features_only(x):
    Conv3d(4, 2)(x)
    other = x.to(torch.float64)
    assert other.dtype == torch.float64
    assert other.coords is x.coords
    assert other.cache is x.cache
    assert x.to("meta").coords.device.type == "meta"
    assert x.to("cpu", non_blocking=True).device.type == "cpu"


def test_dense_and_back(x):
    dense = x.dense()
    assert dense.shape == (3, 4, 5, 6, 7)
    for row, site in zip(x.feats, x.coords.tolist(), strict=True):
        b, i, j, k = site
        assert torch.equal(dense[b, :, i, j, k], row)
    again = SparseTensor.from_dense(dense)
    assert len(again) == len(x)
    assert torch.equal(again.dense(), dense)


def test_replaced_features_share_the_cache_and_need_a_row_for_each_site(x):
    assert x.replace_feats(x.feats + 1).cache is x.cache
    with pytest.raises(CoordinateError, match="one row of features"):
        x.replace_feats(x.feats[:-1])


@pytest.mark.parametrize("batch_size", [None, 0, 2])
def test_an_empty_tensor_has_an_empty_dense_grid(batch_size):
    coords = torch.zeros(0, 4, dtype=torch.int32)
    x = SparseTensor(torch.zeros(0, 3), coords, spatial_shape=(4, 5, 6), batch_size=batch_size)
    assert x.dense().shape == (batch_size or 0, 3, 4, 5, 6)


def test_integers_of_numpy_are_integers():
    coords = torch.zeros(1, 4, dtype=torch.int32)
    shape = np.array([3, 4, 5])
    x = SparseTensor(torch.ones(1, 1), coords, stride=np.int64(2), spatial_shape=shape)
    assert (x.stride, x.spatial_shape) == ((2, 2, 2), (3, 4, 5))
    assert all(type(n) is int for n in (*x.stride, *x.spatial_shape))


@pytest.mark.parametrize("value", [2.5, "3", (1, 2), (1, 2, 0)])
def test_invalid_sizes_are_refused(value):
    with pytest.raises(ConfigError, match="kernel size is"):
        KernelSpec.of(value)


def test_stride_and_shape_are_checked():
    coords = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ConfigError, match="stride"):
        SparseTensor(torch.ones(1, 1), coords, stride=0)
    with pytest.raises(ConfigError, match="spatial_shape"):
        SparseTensor(torch.ones(1, 1), coords, spatial_shape=(3, 3))


def test_collate_numbers_the_samples():
    samples = [
        (torch.tensor([[1, 2, 3]]), torch.tensor([[1.0]])),
        (torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 1)),
        (torch.tensor([[0, 0, 0], [3, 3, 3]], dtype=torch.int16), torch.tensor([[2.0], [3.0]])),
    ]
    x = sparse_collate(samples, spatial_shape=(4, 4, 4))
    assert x.coords.tolist() == [[0, 1, 2, 3], [2, 0, 0, 0], [2, 3, 3, 3]]
    assert x.coords.dtype == torch.int32
    assert x.feats.flatten().tolist() == [1, 2, 3]
    assert x.batch_size == 3
    assert "sites=3" in repr(x)
