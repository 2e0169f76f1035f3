"""Convolution on a CUDA device against the CPU and dense convolution in float64."""

import pytest
import torch

from sparsepipe.sparse import KernelSpec
from tests.support.sparse_references import Case, compared

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.02)],
)
@pytest.mark.parametrize(
    "spec",
    [KernelSpec.of(3), KernelSpec.of((3, 2, 1), stride=(2, 2, 1)), KernelSpec.of(3, dilation=2)],
    ids=str,
)
def test_every_precision_is_close_to_dense_convolution(spec, dtype, tolerance):
    case = Case((9, 7, 8), 3, 0.3, 16, 8, spec, seed=6)
    assert compared(case, dtype, DEVICE)[-1] < tolerance
