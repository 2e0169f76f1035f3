"""Spatial parallelism with two ranks on one CUDA device over gloo equals a Trainer on it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.processes import run
from tests.unit.strategies.test_spatial import CASES, check, trained

ACCELERATOR = "gpu"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("name", "backend"), [("plain", "gloo"), ("recomputed", "gloo"), ("one shard", "nccl")]
)
def test_a_training_equals_one_process(name: str, backend: str) -> None:
    """Over NCCL, which gives no device to two ranks, with one."""
    ranks = math.prod(CASES[name].grid)
    settings = ("64-true", None, ACCELERATOR)
    everyone = run(trained, ranks, name, ranks, *settings, backend, limit_s=180)
    check(name, everyone, alone=lambda _: run(trained, 1, name, 0, *settings)[0])
