"""Sums and concatenations of sparse tensors, against dense ones."""

import pytest
import torch
from hypothesis import given, settings

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse import KernelSpec, NativeBackend, SparseTensor, add, cat
from tests.support.sparse_references import cases

BACKEND = NativeBackend()


def features(x, channels=3):
    return torch.randn(len(x), channels, dtype=torch.float64, requires_grad=True)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=cases())
def test_sum_and_gradients(case):
    x = case.tensor()
    first, second = features(x), features(x)
    # Coordinates of the second are equal, but its own.
    other = SparseTensor(
        second, x.coords.clone(), spatial_shape=x.spatial_shape, batch_size=x.batch_size
    )
    total = add(x.replace_feats(first), other)
    assert torch.equal(total.dense(), x.replace_feats(first).dense() + other.dense())
    both = cat([x.replace_feats(first), other]).dense()
    assert torch.equal(both, torch.cat([x.replace_feats(first).dense(), other.dense()], dim=1))
    weights = torch.randn_like(first)
    (total.feats * weights).sum().backward()
    assert torch.equal(first.grad, weights)
    assert torch.equal(second.grad, weights)


def test_equal_windows_lead_to_the_same_coordinates_and_cache():
    coords = torch.tensor([[0, 0, 0, 0], [0, 3, 1, 2], [1, 3, 3, 3]], dtype=torch.int32)
    x = SparseTensor(torch.ones(3, 1), coords, spatial_shape=(4, 4, 4))
    down = KernelSpec.of(2, stride=2)
    paths = [BACKEND.conv3d(x, torch.randn(8, 1, 5), None, down) for _ in range(2)]
    assert paths[0].coords is paths[1].coords
    total = add(*paths)
    assert total.cache is paths[0].cache
    assert (total.stride, total.spatial_shape) == ((2, 2, 2), (2, 2, 2))


SITES = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SparseTensor(torch.ones(2, 1), SITES.flip(0)), "different sites, or with"),
        (SparseTensor(torch.ones(2, 1), SITES, stride=2), "cannot add .*stride"),
        (SparseTensor(torch.ones(1, 1), SITES[:1]), "cannot add .*sites=1"),
        (SparseTensor(torch.ones(2, 1), SITES, batch_size=2), "cannot add .*batch_size=2"),
        (SparseTensor(torch.ones(2, 1), SITES, spatial_shape=(2, 2, 2)), "cannot add .*spatial"),
        (SparseTensor(torch.ones(2, 3), SITES), "cannot add .*channels"),
    ],
)
def test_tensors_that_do_not_match_are_refused(other, message):
    with pytest.raises(CoordinateError, match=message) as caught:
        add(SparseTensor(torch.ones(2, 1), SITES), other)
    assert caught.value.remedy
    if "channels" not in message:
        with pytest.raises(CoordinateError, match=message.replace("add", "concatenate")):
            cat([SparseTensor(torch.ones(2, 1), SITES), other])
