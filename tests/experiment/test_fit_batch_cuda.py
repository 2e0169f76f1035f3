"""The largest batch on a GPU, whose memory really runs out."""

from __future__ import annotations

import pytest
import torch

from sparsepipe.results.files import read_json

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("networks_for_ranks"),
]


def test_a_gpu_made_small_runs_out_of_memory(job) -> None:
    # Weights, gradients and momentum take 264 MB, each shape 8 MB in each activation.
    asked = ("task=fit_batch", "parallel=single", "model.width=2000000", "task.start=1")
    path = job(*asked, "task.budget_bytes=560e6", "hardware.accelerator=cuda")
    result = read_json(path / "result.json")
    assert 1 <= result["largest_batch"] <= 18
    assert result["limited_by"] == "out_of_memory"
    assert 264e6 < result["step_memory_bytes"] <= 560e6
