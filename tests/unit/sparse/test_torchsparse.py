"""The adapter on the statements of torchsparse's two versions, against the native backend."""

import copy
import logging
import pickle
import sys

import pytest
import torch

from sparsepipe.errors import BackendError, CoordinateError
from sparsepipe.sparse import Backend, KernelSpec, SparseTensor
from sparsepipe.sparse.backends import torchsparse as adapter
from sparsepipe.sparse.backends.torchsparse import Library, TorchSparseBackend, convolve
from tests.support.torchsparse_cases import NATIVE, SPECS, gradients, scattered, weights
from tests.support.torchsparse_statement import Caches, statement_of

VERSIONS = ["2.0", "2.1"]


def by(module):
    return lambda *args: convolve(Library.of(module), *args)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [True, False])
def test_sites_features_and_gradients_are_the_native_ones(version, spec, shape):
    x = scattered(shape=shape, stride=(1, 2, 4))
    if not shape and not spec.is_submanifold and any(spec.before):
        for conv in (NATIVE.conv3d, by(statement_of(version))):
            with pytest.raises(CoordinateError, match="extent"):
                conv(x, *weights(spec), spec)
        return
    ours, our_grads = gradients(NATIVE.conv3d, x, spec)
    theirs, their_grads = gradients(by(statement_of(version)), x, spec)
    assert torch.equal(theirs.coords, ours.coords)
    assert theirs.stride == ours.stride
    assert theirs.batch_size == ours.batch_size
    assert theirs.cache.extent == ours.cache.extent
    assert theirs.spatial_shape == ours.spatial_shape
    torch.testing.assert_close(theirs.feats, ours.feats)
    for their_grad, our_grad in zip(their_grads, our_grads, strict=True):
        torch.testing.assert_close(their_grad, our_grad)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("extent", [(4, 4, 4), (5, 5, 5), (1, 1, 1), (8, 3, 2)])
def test_full_grids_of_even_and_odd_extent_lose_no_site(version, extent):
    x = scattered(extent, share=1.1)
    for spec in (KernelSpec.of(2), KernelSpec.of(2, stride=2), KernelSpec.of(3, stride=2)):
        kernel, _ = weights(spec)
        ours = NATIVE.conv3d(x, kernel, None, spec)
        theirs = convolve(Library.of(statement_of(version)), x, kernel, None, spec)
        assert torch.equal(theirs.coords, ours.coords)
        torch.testing.assert_close(theirs.feats, ours.feats)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_network_of_several_levels_equals_the_native_one(version):
    conv = by(statement_of(version))

    def network(conv3d, x):
        for number, spec in enumerate(
            [KernelSpec.of(3), KernelSpec.of(2, stride=2), KernelSpec.of(3), KernelSpec.of(2)]
        ):
            kernel, bias = weights(spec, x.num_channels, seed=number)
            x = conv3d(x, kernel, bias, spec)
            if number == 2:
                x = NATIVE.max_pool3d(x, KernelSpec.of(2, stride=2))
        return x

    x = scattered((9, 8, 7))
    ours, theirs = network(NATIVE.conv3d, x), network(conv, x)
    assert torch.equal(theirs.coords, ours.coords)
    assert theirs.stride == ours.stride == (4, 4, 4)
    assert theirs.spatial_shape == ours.spatial_shape == (3, 2, 2)
    torch.testing.assert_close(theirs.feats, ours.feats, rtol=1e-5, atol=1e-3)  # of some hundreds


@pytest.mark.parametrize("version", VERSIONS)
def test_kernel_maps_are_built_once_for_a_level(version):
    module = statement_of(version)
    conv, tile, cube = by(module), KernelSpec.of(2, stride=2), KernelSpec.of(3)
    x = conv(scattered(channels=3), weights(cube, 3)[0], None, cube)
    for _ in range(3):
        x = conv(x, weights(cube, 3)[0], None, cube)
    assert module.engine.built == 1
    left, right = (conv(x, weights(tile, 3)[0], None, tile) for _ in range(2))
    assert module.engine.built == 2
    assert left.cache is right.cache
    for y in (left, right):
        conv(y, weights(cube, 3)[0], None, cube)
    assert module.engine.built == 3


def test_maps_made_for_inference_are_not_used_for_training():
    conv, spec = by(statement_of("2.1")), KernelSpec.of(3)
    kernel, _ = weights(spec, 3)
    with torch.no_grad():
        x = conv(scattered(channels=3), kernel, None, spec)
        conv(x, kernel, None, spec)
    conv(x, kernel, None, spec).feats.sum().backward()
    assert kernel.grad.abs().sum() > 0


def test_a_strided_window_does_not_spoil_the_next_ones_lookup(monkeypatch):
    # torchsparse 2.1 keeps the output table of a strided window as its input level's, and
    # shares tables between all tensors in its global cache mode.
    everyones = Caches()
    monkeypatch.setattr("tests.support.torchsparse_statement.new_caches", lambda: everyones)
    conv, cube, wide = by(statement_of("2.1")), KernelSpec.of(3), KernelSpec.of((1, 3, 3))
    x = conv(scattered(channels=3), weights(cube, 3)[0], None, cube)
    conv(x, weights(cube, 3)[0], None, KernelSpec.of(3, stride=2))
    kernel, _ = weights(wide, 3)
    theirs, ours = conv(x, kernel, None, wide), NATIVE.conv3d(x, kernel, None, wide)
    torch.testing.assert_close(theirs.feats, ours.feats)


def test_many_outputs_of_few_inputs_fit_the_hash_table_and_the_setting_returns():
    module, spec = statement_of("2.1"), KernelSpec.of(3, stride=2)
    # At odd places four apart every input touches 8 sites that no other touches.
    sites = torch.cartesian_prod(*[torch.arange(1, 32, 4)] * 3).int()
    coords = torch.nn.functional.pad(sites, (1, 0))
    x = SparseTensor(torch.ones(len(coords), 1), coords, spatial_shape=(64, 64, 64))
    kernel = torch.ones(27, 1, 1)
    out = convolve(Library.of(module), x, kernel, None, spec)
    assert len(out) == 8 * len(x)
    assert module.backends.hash_rsv_ratio == 2


@pytest.mark.parametrize("has_tf32", [True, False])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_tf32_follows_torchs_own_switch(monkeypatch, precision, has_tf32):
    module, spec = statement_of("2.1"), KernelSpec.of(3)
    expected = has_tf32 and precision == "high"
    module.backends.allow_tf32 = not expected
    monkeypatch.setattr(adapter, "_has_tf32", lambda device: has_tf32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        convolve(Library.of(module), scattered(), weights(spec)[0], None, spec)
    finally:
        torch.set_float32_matmul_precision(before)
    assert module.backends.allow_tf32 is expected


@pytest.mark.parametrize("version", VERSIONS)
def test_empty_tensors_keep_working(version):
    x = scattered(share=0.0)
    for spec in (KernelSpec.of(3), KernelSpec.of(2, stride=2)):
        out = convolve(Library.of(statement_of(version)), x, weights(spec)[0], None, spec)
        assert out.feats.shape == (0, 3)


@pytest.mark.parametrize("version", VERSIONS)
def test_bad_operands_and_coordinates_are_refused(version):
    library, spec = Library.of(statement_of(version)), KernelSpec.of(3)
    x, kernel = scattered(), weights(spec)[0]
    for bad in (kernel[:26], kernel[:, :1], kernel.double()):
        with pytest.raises(BackendError) as caught:
            convolve(library, x, bad, None, spec)
        assert caught.value.remedy
    half = x.replace_feats(x.feats.bfloat16())
    with pytest.raises(BackendError, match="bfloat16"):
        convolve(library, half, kernel.bfloat16(), None, spec)
    doubled = SparseTensor(x.feats[[0, 0]], x.coords[[0, 0]], spatial_shape=(5, 6, 7))
    with pytest.raises(CoordinateError):
        convolve(library, doubled, kernel, None, spec)


def test_windows_for_the_native_backend_are_warned_of_once(caplog):
    adapter._warn_once.cache_clear()
    library, spec = Library.of(statement_of("2.1")), KernelSpec.of(3, dilation=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            convolve(library, scattered(), weights(spec)[0], None, spec)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "dilation" in caplog.text
    assert "native" in caplog.text


@pytest.fixture
def absent(monkeypatch):
    adapter.load_library.cache_clear()
    monkeypatch.setattr(sys, "meta_path", [_Hide("torchsparse"), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torchsparse", raising=False)
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: None)


class _Hide:
    def __init__(self, name):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def test_without_torchsparse_the_error_has_a_remedy(absent):
    with pytest.raises(BackendError, match="not installed") as caught:
        TorchSparseBackend()
    assert "backend=native" in caught.value.remedy
    with pytest.raises(BackendError, match="not installed"):
        adapter.load_library()


def test_a_torchsparse_that_does_not_import_is_named_broken(monkeypatch, tmp_path):
    (tmp_path / "torchsparse.py").write_text("raise RuntimeError('No CUDA GPUs are available')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchsparse", raising=False)
    adapter.load_library.cache_clear()
    with pytest.raises(BackendError, match="No CUDA GPUs are available") as caught:
        adapter.load_library()
    assert "backend=native" in caught.value.remedy


def test_on_cpu_it_refuses_to_convolve_but_pools(monkeypatch):
    monkeypatch.setattr(adapter.importlib.util, "find_spec", lambda name: object())
    backend = TorchSparseBackend()
    with pytest.raises(BackendError, match="cpu") as caught:
        backend.conv3d(scattered(), weights(KernelSpec.of(3))[0], None, KernelSpec.of(3))
    assert "backend=native" in caught.value.remedy
    x, spec = scattered(), KernelSpec.of(2, stride=2)
    assert torch.equal(backend.max_pool3d(x, spec).feats, NATIVE.max_pool3d(x, spec).feats)
    assert isinstance(backend, Backend)
    assert backend.name == "torchsparse"
    assert pickle.loads(pickle.dumps(backend)) == copy.deepcopy(backend) == backend


def test_old_versions_are_refused():
    module = statement_of("2.0")
    module.__version__ = "1.4.0"
    with pytest.raises(BackendError, match=r"1\.4\.0 is too old"):
        Library.of(module)


def test_output_grids_of_more_cells_than_an_int_counts_are_refused():
    """torchsparse 2.1 reads the number of an output cell back as a 32-bit integer."""
    coords = torch.zeros(1, 4, dtype=torch.int32)
    spec = KernelSpec.of(2, stride=2)
    kernel, _ = weights(spec)

    def down(extent, version, window=spec):
        x = SparseTensor(torch.ones(1, 2), coords, spatial_shape=extent, batch_size=2)
        return convolve(Library.of(statement_of(version)), x, kernel, None, window)

    large, below = (2048, 2048, 2048), (2048, 2048, 2046)
    with pytest.raises(BackendError, match=r"2,147,483,648 at stride \(2, 2, 2\)"):
        down(large, "2.1")
    for extent, version, window in (
        (below, "2.1", spec),
        (large, "2.0", spec),
        (large, "2.1", KernelSpec.of(2)),  # the sites of its input
    ):
        assert len(down(extent, version, window)) == 1
