"""Spatial parallelism with two ranks on one CUDA device over gloo equals a plain Trainer on it."""

from __future__ import annotations

import pytest
import torch

from tests.support.processes import run
from tests.unit.strategies.test_spatial import BOUND, gap, trained

ACCELERATOR = "gpu"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_training_equals_one_process(recompute: bool) -> None:
    clip = 0.1 if recompute else None
    (expected,) = run(trained, 1, None, 1, False, False, clip, None, ACCELERATOR)
    settings = ((1, 2), 1, recompute, recompute, clip, None, ACCELERATOR)
    for found in run(trained, 2, *settings, limit_s=180):
        for name, value in found["weights"].items():
            if not name.startswith(("accuracy", "confusion")):
                assert gap(value.double(), expected["weights"][name].double()) <= BOUND, name
        assert found["losses"] == pytest.approx(expected["losses"], rel=BOUND)
        assert gap(found["predicted"], expected["predicted"]) <= BOUND
        assert torch.equal(found["counts"], expected["counts"])
