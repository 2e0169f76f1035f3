"""The Triton backend on a CUDA device, against the native backend in float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from sparsepipe.sparse import Conv3d, GlobalMaxPool, KernelSpec, MaxPool3d, NativeBackend
from sparsepipe.sparse.backends.auto import AutoBackend, chosen
from tests.support.triton_cases import (
    Case,
    convolution_distances,
    pool_distances,
    scattered,
    transposed_distances,
)

pytest.importorskip("triton")

from sparsepipe.sparse.backends.spconv_triton import SpconvTritonBackend
from sparsepipe.sparse.backends.triton.backend import TritonBackend

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [
    Case(window, channels, width, dtype, extent=(17, 12, 20))
    for window in (
        KernelSpec.of(3),
        KernelSpec.of(2, stride=2),
        KernelSpec.of(3, stride=2),
        KernelSpec.of((1, 5, 3), dilation=(1, 2, 1)),
    )
    for channels, width in ((1, 64), (3, 16), (17, 33), (64, 64), (256, 128))
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
]


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("kind", [TritonBackend, SpconvTritonBackend])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolutions_and_their_gradients(case: Case, kind: type[TritonBackend]) -> None:
    if kind is SpconvTritonBackend:
        pytest.importorskip("spconv_triton")
    # TF32 has the mantissa of float16.
    tolerance = max(case.tolerance, 1e-2)
    assert max(convolution_distances(case, kind(), "cuda")) < tolerance


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("to_like", [True, False])
@pytest.mark.parametrize("case", CASES[15:45:2], ids=str)
def test_transposed_and_inverse_convolutions(case: Case, to_like: bool) -> None:
    found = transposed_distances(case, TritonBackend(), "cuda", to_like=to_like)
    assert max(found) < max(case.tolerance, 1e-2)


@pytest.mark.parametrize(
    "pool",
    [
        lambda by, x: by.max_pool3d(x, KernelSpec.for_pooling(2)).feats,
        lambda by, x: by.max_pool3d(x, KernelSpec.for_pooling(3, stride=2)).feats,
        lambda by, x: by.avg_pool3d(x, KernelSpec.for_pooling(3, stride=2)).feats,
        lambda by, x: by.global_max_pool(x),
        lambda by, x: by.global_avg_pool(x),
    ],
)
def test_pooling_and_its_gradient(pool) -> None:
    case = Case(KernelSpec.of(3), 70, 70, extent=(17, 12, 20))
    assert max(pool_distances(pool, TritonBackend(), case, "cuda")) < 1e-6


def test_bits_repeat_and_minibatches_follow_each_other() -> None:
    """Also those whose maps are made beside the step before, from pinned memory."""
    case = Case(KernelSpec.of(3), 8, 8, torch.float16, extent=(40, 40, 40), share=0.05)
    found = []
    for kind, pins in ((TritonBackend, True), (TritonBackend, False), (NativeBackend, False)):
        torch.manual_seed(0)
        by = kind()
        layers = torch.nn.Sequential(
            Conv3d(8, 64, backend=by), MaxPool3d(backend=by), Conv3d(64, 64, backend=by),
            MaxPool3d(backend=by), Conv3d(64, 128, backend=by), GlobalMaxPool(backend=by),
        ).cuda().half()  # fmt: skip
        optimizer = torch.optim.SGD(layers.parameters(), lr=1e-4)
        losses = []
        for seed in range(6):
            x = scattered(case, batch_size=4, seed=seed)
            x = x.pin_memory().to("cuda", non_blocking=True) if pins else x.to("cuda")
            loss = layers(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(
            [*torch.stack(losses).tolist(), *(p.sum().item() for p in layers.parameters())]
        )
    assert found[0] == found[1]
    assert found[0] == pytest.approx(found[2], rel=2e-2)


def test_the_automatic_backend_is_triton_where_it_runs() -> None:
    expected = TritonBackend if torch.cuda.get_device_capability() >= (8, 0) else NativeBackend
    assert type(chosen(torch.device("cuda", 0))) is expected
    assert isinstance(Conv3d(1, 1).backend, AutoBackend)
