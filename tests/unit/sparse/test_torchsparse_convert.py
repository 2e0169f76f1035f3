import itertools

import pytest
import torch

from sparsepipe.errors import BackendError, CheckpointError
from sparsepipe.sparse import Conv3d, KernelSpec
from sparsepipe.sparse.backends.torchsparse_convert import (
    V2_0,
    V2_1,
    coords_from_torchsparse,
    coords_to_torchsparse,
    difference,
    from_torchsparse,
    spatial_range,
    to_torchsparse,
)

OURS = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 7], [2, 5, 4, 0]], dtype=torch.int32)


def test_coordinates_of_2_1_are_ours():
    assert torch.equal(coords_to_torchsparse(OURS, (2, 4, 8), V2_1), OURS)


def test_coordinates_of_2_0_are_batch_last_and_multiplied():
    theirs = coords_to_torchsparse(OURS, (2, 4, 8), V2_0)
    assert theirs.tolist() == [[2, 8, 24, 0], [0, 0, 56, 0], [10, 16, 0, 2]]
    assert theirs.dtype == torch.int32
    assert theirs.is_contiguous()


@pytest.mark.parametrize("convention", [V2_0, V2_1])
@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 2, 2), (4, 1, 8)])
def test_coordinates_come_back(convention, stride):
    there = coords_to_torchsparse(OURS, stride, convention)
    back = coords_from_torchsparse(there, stride, convention)
    assert torch.equal(back, OURS)
    assert back.dtype == torch.int32
    assert coords_from_torchsparse(there[:0], stride, convention).shape == (0, 4)


def labelled(offsets):
    """A kernel [K, 1, 3] whose entries say which offset they belong to."""
    return torch.tensor(offsets, dtype=torch.float32)[:, None, :]


def torchsparse_offsets(size):
    """Stated from torchsparse's get_kernel_offsets, for odd sizes and sizes up to 2."""
    starts = [0 if k % 2 == 0 else -(k // 2) for k in size]
    ranges = [range(s, s + k) for s, k in zip(starts, size, strict=True)]
    if (size[0] * size[1] * size[2]) % 2 == 1:  # the last loop variable runs fastest
        return [(x, y, z) for z in ranges[2] for y in ranges[1] for x in ranges[0]]
    return [(x, y, z) for x in ranges[0] for y in ranges[1] for z in ranges[2]]


def minkowski_offsets(size):
    """Stated from MinkowskiEngine's kernel_region: the index in mixed radix, x lowest."""
    offsets = []
    for index in range(size[0] * size[1] * size[2]):
        offset, rest = [], index
        for k in size:
            rest, digit = divmod(rest, k)
            offset.append(digit if k % 2 == 0 else digit - k // 2)
        offsets.append(tuple(offset))
    return offsets


SIZES = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (5, 5, 5), (3, 1, 5), (1, 2, 2), (2, 1, 2), (2, 2, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_kernels_of_torchsparse_arrive_at_their_offsets(size):
    saved = labelled(torchsparse_offsets(size))
    loaded = from_torchsparse(saved, size)
    assert torch.equal(loaded, labelled(KernelSpec.of(size).offsets()))
    assert torch.equal(to_torchsparse(loaded, size), saved)


@pytest.mark.parametrize("size", [*SIZES, (4, 4, 4), (2, 3, 4)])
def test_kernels_of_minkowski_engine_have_our_order_of_offsets(size):
    saved = labelled(minkowski_offsets(size))
    assert torch.equal(saved, labelled(KernelSpec.of(size).offsets()))


def test_the_order_for_size_two_written_out():
    z_fastest = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0)]
    x_fastest = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)]
    last = [(1, 1, 1)]
    loaded = from_torchsparse(labelled(z_fastest + last), 2)
    assert torch.equal(loaded, labelled(x_fastest + last))
    assert not torch.equal(loaded, labelled(z_fastest + last))
    assert KernelSpec.of(2).offsets() == x_fastest + last


def test_one_by_one_kernels_without_offset_axis_load_into_the_layer():
    flat = torch.randn(3, 5)
    assert torch.equal(from_torchsparse(flat, 1), flat[None])
    layer = Conv3d(3, 5, kernel_size=1, bias=True)
    layer.load_state_dict({"kernel": flat, "bias": torch.arange(5.0)[None]})
    assert torch.equal(layer.kernel[0], flat)
    assert layer.bias.tolist() == [0, 1, 2, 3, 4]


def test_gradients_return_through_the_order():
    kernel = torch.randn(8, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: to_torchsparse(k, 2), kernel)


@pytest.mark.parametrize("convert", [from_torchsparse, to_torchsparse])
@pytest.mark.parametrize("shape", [(26, 1, 1), (27, 1), (27,), (3, 3, 3, 1, 1)])
def test_a_kernel_of_another_size_is_refused(convert, shape):
    with pytest.raises(CheckpointError, match=r"\(3, 3, 3\)"):
        convert(torch.zeros(shape), 3)


@pytest.mark.parametrize("size", [4, (2, 3, 3), (1, 4, 1)])
def test_sizes_that_torchsparse_reads_in_several_ways_are_refused(size):
    volume = KernelSpec.of(size).volume
    with pytest.raises(BackendError, match="different offsets"):
        from_torchsparse(torch.zeros(volume, 1, 1), size)
    assert "offsets" in difference(KernelSpec.of(size), V2_1)


@pytest.mark.parametrize(
    ("spec", "v2_0", "v2_1"),
    [
        (KernelSpec.of(3), True, True),
        (KernelSpec.of(5), True, True),
        (KernelSpec.of(2, stride=2), True, True),
        (KernelSpec.of(3, stride=3), False, True),
        (KernelSpec.of(3, stride=2), False, True),
        (KernelSpec.of(1, stride=2), False, True),
        (KernelSpec.of(3, dilation=2), False, False),
        (KernelSpec.of(1, dilation=2), True, True),
        (KernelSpec.of((1, 3, 3), dilation=(2, 1, 1)), True, True),
    ],
)
def test_windows_that_each_version_can_compute(spec, v2_0, v2_1):
    assert (difference(spec, V2_0) is None) == v2_0
    assert (difference(spec, V2_1) is None) == v2_1


def test_the_declared_range_gives_our_grid():
    for extent, k, s in itertools.product(range(1, 12), (1, 2, 3, 5), (1, 2, 3)):
        spec = KernelSpec.of(k, stride=s)
        batch, *declared = spatial_range((extent,) * 3, batch_size=7, spec=spec)
        pad = k // 2 if k % 2 else 0
        # torchsparse's own formula for the output extent
        derived = [(d + 2 * pad - (k - 1) - 1) // s + 1 for d in declared]
        assert derived == [-(-extent // s)] * 3
        assert batch == 7
