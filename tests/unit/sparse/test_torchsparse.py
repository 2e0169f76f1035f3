"""The adapter on a statement of what torchsparse computes, against the native backend."""

import sys

import pytest
import torch

from sparsepipe.errors import BackendError, ConfigError, CoordinateError
from sparsepipe.models.convert import own_kernel
from sparsepipe.sparse import KernelSpec, SparseTensor
from sparsepipe.sparse.backends import torchsparse as adapter
from sparsepipe.sparse.backends.torchsparse import TorchSparseBackend, convolve
from tests.support.torchsparse_cases import NATIVE, SPECS, gradients, scattered, weights
from tests.support.torchsparse_statement import offset_list, statement


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sites_features_and_gradients_are_the_native_ones(spec):
    module, x = statement(), scattered(stride=(1, 2, 4))
    ours, our_grads = gradients(NATIVE.conv3d, x, spec)
    theirs, their_grads = gradients(lambda *args: convolve(module, *args), x, spec)
    is_theirs = spec.volume % 2 and spec.volume > 1 and spec.is_submanifold
    assert module.engine.built == bool(is_theirs and spec.dilation == (1, 1, 1))
    assert torch.equal(theirs.coords, ours.coords)
    assert theirs.stride == ours.stride
    assert theirs.spatial_shape == ours.spatial_shape
    torch.testing.assert_close(theirs.feats, ours.feats)
    for their_grad, our_grad in zip(their_grads, our_grads, strict=True):
        torch.testing.assert_close(their_grad, our_grad)


def test_kernel_maps_are_built_once_for_a_level_and_go_with_it():
    module, cube, tile = statement(), KernelSpec.of(3), KernelSpec.of(2, stride=2)
    kernel = weights(cube, 3)[0]
    before = len(adapter._kernel_maps)
    x = convolve(module, scattered(channels=3), kernel, None, cube)
    for _ in range(3):
        x = convolve(module, x, kernel, None, cube)
    assert module.engine.built == 1
    for _ in range(2):
        coarse = convolve(module, x, weights(tile, 3)[0], None, tile)
        convolve(module, coarse, kernel, None, cube)
    assert module.engine.built == 2
    del x, coarse
    assert len(adapter._kernel_maps) == before


def test_maps_made_for_inference_are_not_used_for_training():
    module, spec = statement(), KernelSpec.of(3)
    kernel, _ = weights(spec, 3)
    with torch.no_grad():
        x = convolve(module, scattered(channels=3), kernel, None, spec)
        convolve(module, x, kernel, None, spec)
    convolve(module, x, kernel, None, spec).feats.sum().backward()
    assert kernel.grad.abs().sum() > 0


def test_bad_operands_and_coordinates_are_refused():
    module, spec = statement(), KernelSpec.of(3)
    x, kernel = scattered(), weights(spec)[0]
    half = x.replace_feats(x.feats.bfloat16())
    for tensor, bad in (
        (x, kernel[:26]),
        (x, kernel[:, :1]),
        (x, kernel.double()),
        (half, kernel.bfloat16()),
    ):
        with pytest.raises(BackendError) as caught:
            convolve(module, tensor, bad, None, spec)
        assert caught.value.remedy
    doubled = SparseTensor(x.feats[[0, 0]], x.coords[[0, 0]], spatial_shape=(5, 6, 7))
    with pytest.raises(CoordinateError):
        convolve(module, doubled, kernel, None, spec)


@pytest.mark.parametrize("program", [None, "raise RuntimeError('No CUDA GPUs')", "__version__ = 2"])
def test_where_torchsparse_cannot_serve_the_error_has_a_remedy(monkeypatch, tmp_path, program):
    spec, x = KernelSpec.of(3), scattered()
    for name in [name for name in sys.modules if name.split(".")[0] == "torchsparse"]:
        monkeypatch.delitem(sys.modules, name)
    if program is None:
        monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(BackendError) as caught:
            TorchSparseBackend()
        assert "backend=native" in caught.value.remedy
        return
    folder = tmp_path / "torchsparse"
    (folder / "nn").mkdir(parents=True)
    (folder / "__init__.py").write_text(program)
    for name in ("backend.py", "nn/__init__.py", "nn/functional.py"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    backend = TorchSparseBackend()
    with pytest.raises(BackendError, match="cpu"):
        backend.conv3d(x, weights(spec)[0], None, spec)
    monkeypatch.setattr(SparseTensor, "device", torch.device("cuda"))
    with pytest.raises(BackendError, match=r"No CUDA GPUs|older than 2\.1") as caught:
        backend.conv3d(x, weights(spec)[0], None, spec)
    assert "backend=native" in caught.value.remedy


def labelled(offsets):
    """A kernel [K, 1, 3] whose entries say which offset they belong to."""
    return torch.tensor(offsets, dtype=torch.float32)[:, None, :]


SIZES = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (5, 5, 5), (3, 1, 5), (1, 2, 2), (2, 1, 2), (2, 2, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_kernels_of_torchsparse_arrive_at_their_offsets(size):
    loaded = own_kernel(labelled(offset_list(size)), "torchsparse", size)
    assert torch.equal(loaded, labelled(KernelSpec.of(size).offsets()))


@pytest.mark.parametrize("size", [*SIZES, (4, 4, 4), (2, 3, 4)])
def test_kernels_of_minkowski_engine_have_our_order_of_offsets(size):
    """As MinkowskiEngine's kernel_region states them: the index in mixed radix, x lowest."""
    offsets = []
    for index in range(size[0] * size[1] * size[2]):
        offset, rest = [], index
        for k in size:
            rest, digit = divmod(rest, k)
            offset.append(digit if k % 2 == 0 else digit - k // 2)
        offsets.append(tuple(offset))
    assert offsets == KernelSpec.of(size).offsets()


def test_sizes_that_torchsparse_reads_in_several_ways_are_refused():
    with pytest.raises(ConfigError, match="different offsets"):
        own_kernel(torch.zeros(18, 1, 1), "torchsparse", (2, 3, 3))
