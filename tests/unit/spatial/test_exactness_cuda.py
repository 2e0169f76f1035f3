"""Layers and networks on ranks that share one CUDA device over gloo equal one process on it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import spatial_cases, spatial_networks
from tests.support.processes import run_shared

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND = 1e-11
"""Sums of atomic additions come in any order."""
NETWORKS_BOUND = 1e-9


@pytest.mark.parametrize("grid", [(2,), (1, 2), (2, 1, 2)], ids=str)
def test_layers_equal_one_process(grid: tuple[int, ...]) -> None:
    settings = (grid, len(grid), True, DEVICE)
    for found in run_shared(spatial_cases.errors, math.prod(grid), *settings, limit_s=240):
        assert {name: error for name, error in found.items() if not error <= BOUND} == {}


@pytest.mark.parametrize("plain", [True, False], ids=["script", "step"])
def test_networks_equal_one_process(plain: bool) -> None:
    for found in run_shared(spatial_networks.errors, 2, 2, plain, DEVICE, limit_s=240):
        assert {name: error for name, error in found.items() if not error <= NETWORKS_BOUND} == {}


def test_mixed_precision_equals_one_process_but_for_rounding() -> None:
    for found in run_shared(spatial_cases.rounding_errors, 2, (1, 2), DEVICE):
        assert len(found) > 50
        assert {name: error for name, error in found.items() if not error <= 0.03} == {}
