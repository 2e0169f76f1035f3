"""The Triton backend in Triton's interpreter, against the native backend in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from sparsepipe.errors import CoordinateError
from sparsepipe.sparse import (
    Conv3d,
    GlobalMaxPool,
    InstanceNorm,
    InverseConv3d,
    KernelSpec,
    MaxPool3d,
    SparseTensor,
)
from sparsepipe.sparse.kernel_map import KernelMap, invert_rows, watching_kernel_maps

pytest.importorskip("triton")

from sparsepipe.sparse.backends.triton import configurations, levels, tiles
from sparsepipe.sparse.backends.triton.backend import TritonBackend
from sparsepipe.sparse.backends.triton.configurations import INTERPRETED
from sparsepipe.sparse.backends.triton.convolution import Convolution
from sparsepipe.sparse.backends.triton.weights import weight_gradient
from sparsepipe.strategies.pipeline.stage_plan import flop_costs
from tests.support.triton_cases import (
    NATIVE,
    Case,
    convolution_distances,
    counted,
    pool_distances,
    scattered,
    sites,
    transposed_distances,
)

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU runs test_triton_cuda.py")

TRITON = TritonBackend()
WINDOWS = [
    KernelSpec.of(3),
    KernelSpec.of(2, stride=2),
    KernelSpec.of(3, stride=2),
    KernelSpec.of(2),
    KernelSpec.of(3, dilation=2),
    KernelSpec.of((1, 3, 2), stride=(2, 1, 3)),
    KernelSpec.of((1, 5, 3), stride=(1, 2, 1)),
    KernelSpec.of(1, stride=2),
    KernelSpec.of(2, stride=3),
    KernelSpec.of(3, stride=2, dilation=2),
    KernelSpec.of(2, stride=2, dilation=(2, 4, 1)),
]
QUICK = [
    Case(WINDOWS[0], 5, 20, has_bias=True, extent=(3, 4, 4)),
    Case(WINDOWS[0], 2, 9, torch.float16),
    Case(WINDOWS[1], 24, 17, torch.float16),
    Case(WINDOWS[2], 8, 8, torch.bfloat16, extent=(3, 4, 4)),
]
FULL = [
    Case(window, channels, width, dtype, has_bias=width == 3)
    for window in WINDOWS
    for channels, width in ((1, 3), (3, 16), (17, 33), (96, 48))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
] + [
    Case(WINDOWS[0], 70, 130, share=0.9),
    Case(WINDOWS[0], 8, 8, extent=(9, 9, 9), share=0.5),
    Case(WINDOWS[2], 8, 8, extent=(9, 9, 9), share=0.5),
]


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str
)
def test_convolutions_and_their_gradients(case: Case) -> None:
    assert max(convolution_distances(case, TRITON)) < case.tolerance


@pytest.mark.parametrize(
    "case",
    [*QUICK[1:], Case(KernelSpec.of(2), 5, 9), Case(WINDOWS[2], 2, 5)]
    + [pytest.param(each, marks=pytest.mark.full) for each in FULL[4::9]],
    ids=str,
)
@pytest.mark.parametrize("to_like", [True, False])
def test_transposed_and_inverse_convolutions(case: Case, to_like: bool) -> None:
    assert max(transposed_distances(case, TRITON, to_like=to_like)) < case.tolerance


@pytest.mark.full
def test_convolutions_of_many_channels_in_large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "_FEW_PROGRAMS", 1)
    assert configurations.by_rule("pass", 32, 130, 150, 60).rows == 128
    assert max(convolution_distances(Case(WINDOWS[0], 130, 150, has_bias=True), TRITON)) < 1e-5


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("window", [WINDOWS[0], WINDOWS[2], WINDOWS[-2]], ids=str)
def test_no_site_and_one_site(count: int, window: KernelSpec) -> None:
    coords = torch.tensor([[1, 2, 1, 3]], dtype=torch.int32)[:count]
    results = []
    for backend in (TRITON, NATIVE):
        feats = torch.full((count, 6), 0.5, requires_grad=True)
        kernel = torch.linspace(-1, 1, window.volume * 24).view(-1, 6, 4).requires_grad_()
        x = SparseTensor(feats, coords, spatial_shape=(7, 7, 7), batch_size=2)
        out = backend.conv3d(x, kernel, None, window)
        pooled = backend.max_pool3d(out, KernelSpec.for_pooling(2))
        whole = backend.global_max_pool(pooled)
        grads = torch.autograd.grad(whole.sum() + out.feats.sum(), (feats, kernel))
        results.append([out.feats, out.coords, pooled.feats, whole, *grads])
    for ours, native in zip(*results, strict=True):
        torch.testing.assert_close(ours, native)


@pytest.mark.parametrize(
    "pool",
    [
        *(
            lambda by, x, window=window: by.max_pool3d(x, window).feats
            for window in (KernelSpec.for_pooling(2), KernelSpec.for_pooling(3, stride=2))
        ),
        lambda by, x: by.avg_pool3d(x, KernelSpec.for_pooling(3, stride=2)).feats,
        lambda by, x: by.global_max_pool(x),
        lambda by, x: by.global_avg_pool(x),
        lambda by, x: InstanceNorm(5, affine=False, backend=by)(x).feats,
    ],
)
def test_pooling_and_its_gradient(pool) -> None:  # type: ignore[no-untyped-def]
    assert max(pool_distances(pool, TRITON, Case(WINDOWS[1], 5, 5))) < 1e-6


def test_global_maximum_of_numbers_that_are_not_finite() -> None:
    feats = torch.tensor([[torch.inf, 1], [torch.nan, 2], [3, torch.nan]])
    coords = torch.tensor([[0, 0, 0, n] for n in range(3)], dtype=torch.int32)
    x = SparseTensor(feats, coords, spatial_shape=(1, 1, 4), batch_size=1)
    TRITON.max_pool3d(x, KernelSpec.for_pooling(2))  # so that a level was made
    assert TRITON.global_max_pool(x).isnan().all()


@pytest.mark.parametrize(
    "windows", [WINDOWS[:3], pytest.param(WINDOWS, marks=pytest.mark.full)], ids=len
)
def test_maps_are_those_of_the_native_backend_after_one_read_back(
    windows: list[KernelSpec],
) -> None:
    case = Case(WINDOWS[0], 1, 1)

    def maps(cache, get, depth=1):  # type: ignore[no-untyped-def]
        for window in windows:
            found = get(cache, window)
            yield found
            if found.output is not None and depth:
                yield from maps(found.output, get, depth - 1)

    for seed in (1, 2):
        caches = [
            SparseTensor(
                torch.ones(len(each), 1), each, spatial_shape=case.extent, batch_size=3
            ).cache
            for each in (sites(case, seed=seed),) * 2
        ]
        with counted() as counts:
            ours = list(maps(caches[0], levels.kernel_map))
            made = [(tiles.input_rows(each), tiles.pairs(each)) for each in ours]
        for each, (readers, pairs), native in zip(
            ours, made, maps(caches[1], lambda cache, spec: cache.kernel_map(spec)), strict=True
        ):
            rows_KM = native.neighbours_KM
            assert torch.equal(each.neighbours_KM, rows_KM)
            assert torch.equal(readers.sources_KM, invert_rows(rows_KM, native.num_inputs))
            assert pairs.starts.tolist() == [0, *(rows_KM >= 0).sum(1).cumsum(0).tolist()]
            number = int(pairs.starts[-1])
            assert torch.equal(pairs.inputs_P[:number], rows_KM[rows_KM >= 0])
            assert torch.equal(pairs.outputs_P[:number], (rows_KM >= 0).nonzero()[:, 1].int())
            if native.output is not None:
                assert torch.equal(each.output.coords_N4, native.output.coords_N4)
    assert counts["read-backs"] == 1, "of the second minibatch"


@pytest.mark.parametrize(
    "coords", [[[0, 1, 1, 1], [0, 1, 1, 1]], [[2, 1, 1, 1]], [[0, 0, 0, 9]], [[0, -1, 0, 0]]]
)
def test_wrong_coordinates_are_refused_in_the_same_words(coords: list[list[int]]) -> None:
    said = []
    for get in (levels.kernel_map, lambda cache, spec: cache.kernel_map(spec)):
        given = torch.tensor(coords, dtype=torch.int32)
        x = SparseTensor(torch.ones(len(given), 1), given, spatial_shape=(4, 4, 4), batch_size=2)
        with pytest.raises(CoordinateError) as error:
            get(x.cache, WINDOWS[1])
        said.append(str(error.value))
    assert said[0] == said[1]


def test_launches_and_read_backs_of_a_step() -> None:
    layers = torch.nn.Sequential(
        Conv3d(5, 8, backend=TRITON),
        MaxPool3d(backend=TRITON),
        Conv3d(8, 8, backend=TRITON),
        GlobalMaxPool(backend=TRITON),
    )
    case = Case(WINDOWS[0], 5, 8, extent=(4, 4, 4))
    for seed in (0, 1):
        coords = sites(case, seed=seed)
        coords = coords[coords[:, 0].argsort(stable=True)]
        x = SparseTensor(
            torch.ones(len(coords), 5, requires_grad=True), coords, spatial_shape=case.extent,
            batch_size=3,
        )  # fmt: skip
        with counted() as counts:
            layers(x).sum().backward()
    read_backs = counts.pop("read-backs")
    assert read_backs == 1
    of_convolutions = {
        name: counts.pop(name) for name in ("_add_products", "_add_chunk", "_add_chunks")
    }
    assert of_convolutions == {"_add_products": 4, "_add_chunk": 2, "_add_chunks": 2}, (
        "of two layers"
    )
    assert counts.pop("_pool") == counts.pop("_pool_backward") == 1
    assert counts.pop("_pool_samples") == counts.pop("_pool_samples_backward") == 1
    # Of the maps of two levels, beside a sort and a sum for each, and one for the coarser sites.
    assert counts.total() + 2 * 2 + 1 <= 2 * 12


def test_an_inverse_convolution_reads_nothing_back_and_shares_what_its_map_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(levels, "_foreseen", {})
    down = Conv3d(5, 8, 2, stride=2, backend=TRITON)
    up = InverseConv3d(8, 5, 2, stride=2, backend=TRITON)
    case = Case(WINDOWS[1], 5, 8)
    for seed in (0, 1):
        coords = sites(case, seed=seed)
        feats = torch.ones(len(coords), 5, requires_grad=True)
        x = SparseTensor(feats, coords, spatial_shape=case.extent, batch_size=3)
        with counted() as counts:
            up(down(x), x).feats.sum().backward()
    assert counts["read-backs"] == 1, "of the second minibatch"
    assert (counts["_fill_tiles"], counts["_fill_pairs"], counts["_add_products"]) == (2, 1, 4)


def test_each_watched_layer_makes_its_own_maps() -> None:
    case, marks = Case(WINDOWS[0], 1, 1, extent=(4, 4, 4)), []
    for seed in (0, 1):
        x = scattered(case, batch_size=2, seed=seed)
        found = []
        for spec in (WINDOWS[0], WINDOWS[1]):
            before = len(marks)
            with watching_kernel_maps(lambda: marks.append(0)):
                levels.kernel_map(x.cache, spec)
            found.append(len(marks) - before)
        assert found == [2, 2], "a mark before and after"


def test_operations_are_counted_as_the_native_backend_does() -> None:
    found = []
    for backend in (TRITON, NATIVE):
        layers = torch.nn.Sequential(Conv3d(5, 8, backend=backend), MaxPool3d(backend=backend))
        x = scattered(Case(WINDOWS[0], 5, 8), batch_size=2, seed=0)
        found.append(flop_costs(layers, x))
    assert found[0] == found[1]
    assert found[0][0] > 0


def test_second_derivatives_are_those_of_the_native_backend() -> None:
    case = Case(WINDOWS[0], 6, 4, extent=(3, 3, 3))
    penalties = []
    for backend in (TRITON, NATIVE):
        torch.manual_seed(0)
        coords = sites(case)
        feats = torch.randn(6, len(coords)).t().requires_grad_()  # not contiguous
        kernel = torch.randn(27, 4, 6).transpose(1, 2).requires_grad_()
        x = SparseTensor(feats, coords, spatial_shape=case.extent, batch_size=3)
        wide = backend.conv3d(x, kernel, None, WINDOWS[0])
        out = backend.max_pool3d(wide, WINDOWS[1])
        back = torch.randn(8, 4, 4)
        out = backend.conv_transpose3d(out, back, None, WINDOWS[1], like=wide)
        (grad,) = torch.autograd.grad(
            backend.global_max_pool(out).square().sum(), feats, create_graph=True
        )
        penalties.append(torch.autograd.grad(grad.square().sum(), kernel)[0])
    torch.testing.assert_close(*penalties, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_rows_beyond_two_to_the_31_elements() -> None:
    """Only the pages of the rows that are read take memory."""
    channels, last = 64, 2**31 // 64 + 40
    feats = torch.empty(last + 1, channels, dtype=torch.float16)
    rows = torch.tensor([[5, last, -1], [last - 1, -1, 7]], dtype=torch.int32)
    used = [5, 7, last - 1, last]
    feats[used] = torch.randn(4, channels).half()
    kernel = torch.randn(2, channels, 8).half()
    found = KernelMap(KernelSpec.of((2, 1, 1)), rows, num_inputs=last + 1, output=None)
    out = Convolution.apply(feats, kernel, None, found)
    grad = torch.randn(3, 8).half()
    weights = weight_gradient(feats, grad, kernel, found)
    expected, of_kernel = torch.zeros(3, 8).double(), torch.zeros(2, channels, 8).double()
    for k in range(2):
        for row, source in enumerate(rows[k].tolist()):
            if source >= 0:
                expected[row] += feats[source].double() @ kernel[k].double()
                of_kernel[k] += torch.outer(feats[source].double(), grad[row].double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(weights.double(), of_kernel, rtol=1e-2, atol=1e-2)


def test_other_windows_and_precisions_are_native() -> None:
    case = Case(KernelSpec.of(5), 3, 4, extent=(4, 4, 4))
    assert max(convolution_distances(case, TRITON)) < 1e-5
    coords = sites(case)
    x = SparseTensor(torch.ones(len(coords), 3).double(), coords, spatial_shape=4, batch_size=3)
    kernel = torch.ones(27, 3, 2).double()
    ours, native = (by.conv3d(x, kernel, None, WINDOWS[0]).feats for by in (TRITON, NATIVE))
    assert torch.equal(ours, native)


SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
PRODUCTS = ("_add_products", "_add_chunk", "_multiply", "_add_rows")


@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_kernels_compile_for_gpus_that_are_not_here(architecture: int) -> None:
    command = [sys.executable, "-m", "tests.support.triton_compiled", str(architecture)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment, timeout=280
    )
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert {row["kernel"] for row in rows} > {*PRODUCTS, "_find", "_pool", "_mark", "_fill_tiles"}
    for row in rows:
        assert row["local_bytes"] == 0, row
        assert row["shared_bytes"] <= SHARED_BYTES[architecture], row
        if row["kernel"] in PRODUCTS:
            assert row["products"], row
        if row["kernel"] in ("_add_products", "_add_chunk"):
            assert row["copies"], row
