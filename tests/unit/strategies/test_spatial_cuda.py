"""Spatial parallelism with two ranks on one CUDA device over gloo equals a Trainer on it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.processes import run
from tests.unit.strategies.test_spatial import BOUND, gap, trained

ACCELERATOR = "gpu"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("grid", "recompute", "backend"),
    [((1, 2), False, "gloo"), ((1, 2), True, "gloo"), ((1, 1), False, "nccl")],
)
def test_a_training_equals_one_process(
    grid: tuple[int, int], recompute: bool, backend: str
) -> None:
    """Over NCCL, which gives no device to two ranks, with one."""
    clip = 0.1 if recompute else None
    (expected,) = run(trained, 1, None, 1, False, False, clip, None, ACCELERATOR)
    settings = (grid, 1, recompute, recompute, clip, None, ACCELERATOR, backend)
    for found in run(trained, math.prod(grid), *settings, limit_s=180):
        for name, value in found["weights"].items():
            if not name.startswith(("accuracy", "confusion")):
                assert gap(value.double(), expected["weights"][name].double()) <= BOUND, name
        assert found["losses"] == pytest.approx(expected["losses"], rel=BOUND)
        assert gap(found["predicted"], expected["predicted"]) <= BOUND
        assert torch.equal(found["counts"], expected["counts"])
