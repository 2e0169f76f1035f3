"""Which sites a window puts out, against where a dense convolution is not zero."""

import pytest
import torch
from hypothesis import given, settings

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse import KernelSpec, NativeBackend, SparseTensor
from tests.support.sparse_references import cases, dense_conv, sites

BACKEND = NativeBackend()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(case=cases())
def test_output_sites(case):
    x = case.tensor()
    y = BACKEND.conv3d(x, case.kernel(), None, case.spec)
    assert len(sites(y.coords)) == len(y)
    if case.spec.is_submanifold:
        assert torch.equal(y.coords, x.coords)
        return
    if case.spec.is_tiling:
        strides = torch.tensor((1, *case.spec.stride))
        expected = sites(torch.div(x.coords, strides, rounding_mode="floor"))
    else:
        ones = x.replace_feats(torch.ones(len(x), 1, dtype=torch.float64)).dense()
        reached = dense_conv(ones, torch.ones(case.spec.volume, 1, 1).double(), case.spec)
        expected = sites((reached[:, 0] > 0.5).nonzero())
    assert sites(y.coords) == expected


@pytest.mark.parametrize(
    "spec", [KernelSpec.of(3, stride=2), KernelSpec.of(3, stride=3), KernelSpec.of(1, stride=2)]
)
def test_a_samples_sites_do_not_depend_on_its_batch_mates(spec):
    # The last site lies between two output sites: the further one is beyond its own extent.
    corners = torch.tensor([[0, 0, 0, 0], [0, 5, 5, 5], [1, 8, 8, 8]], dtype=torch.int32)
    kernel = torch.ones(spec.volume, 1, 1)

    def first_sample(rows, **shape):
        x = SparseTensor(torch.ones(rows, 1), corners[:rows], **shape)
        y = BACKEND.conv3d(x, kernel, None, spec)
        return sites(y.coords[y.coords[:, 0] == 0])

    assert first_sample(2, spatial_shape=(9, 9, 9)) == first_sample(3, spatial_shape=(9, 9, 9))
    if not any(spec.before):
        assert first_sample(2) == first_sample(3)
        return
    for rows in (2, 3):
        with pytest.raises(CoordinateError, match="extent") as caught:
            first_sample(rows)
        assert "spatial_shape" in caught.value.remedy


def test_a_level_below_knows_its_grid_as_well_as_the_input_does():
    coords = torch.tensor([[0, 0, 0, 0], [0, 7, 7, 7]], dtype=torch.int32)
    tile, overlap = KernelSpec.of(2, stride=2), KernelSpec.of(3, stride=2)
    for shape in (None, (8, 8, 8)):
        x = SparseTensor(torch.ones(2, 1), coords, spatial_shape=shape)
        y = BACKEND.conv3d(x, torch.ones(8, 1, 1), None, tile)
        assert y.spatial_shape == (shape and (4, 4, 4))
        if shape is None:
            with pytest.raises(CoordinateError, match="extent"):
                BACKEND.max_pool3d(y, overlap)
        else:
            assert len(BACKEND.max_pool3d(y, overlap)) == 2
