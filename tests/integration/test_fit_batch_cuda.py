"""The largest batch on a GPU, whose memory really runs out."""

from __future__ import annotations

import pytest
import torch

from sparsepipe.utils.files import read_json

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("networks_for_ranks"),
]


# Weights, gradients and momentum take 264 MB, each shape 8 MB in each activation.
SMALL = (
    "parallel=single",
    "hardware.accelerator=cuda",
    "model.width=2000000",
    "task.budget_bytes=560e6",
)


def test_a_gpu_made_small_runs_out_of_memory(job) -> None:
    path = job("task=fit_batch", "task.start=1", "task.isolated=false", *SMALL)
    result = read_json(path / "result.json")
    assert 1 <= result["largest_batch"] <= 18
    assert result["limited_by"] == "out_of_memory"
    assert 264e6 < result["step_memory_bytes"] <= 560e6


def test_an_isolated_step_that_does_not_fit_is_reported(job) -> None:
    path = job("task=train_if_fits", "data.batch_size=64", *SMALL)
    result = read_json(path / "result.json")
    assert (result["fits"], result["limited_by"]) == (False, "out_of_memory")
