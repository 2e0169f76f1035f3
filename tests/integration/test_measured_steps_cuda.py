"""Training steps on a GPU: its allocator's peak, and a size at which memory really runs out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsepipe.launch.job import run_job
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_largest_size_within_a_budget(workplace: Path) -> None:
    words = ("experiment=bigconv", "paper/network=cnn2d", "hardware.accelerator=cuda")
    sizes = "task.sizes=[[256,256],[512,512],[4096,4096],[8192,8192]]"
    given = ("task.budget_bytes=800e6", "task.timed_steps=2")
    result = read_json(run_job(composed(*words, sizes, *given)).path / "result.json")
    small, middle, large = result["measured_sizes"]
    assert small["fits"]
    assert small["saved_bytes"] < small["peak_bytes"] < middle["peak_bytes"] <= 800e6
    assert middle["step_s"] > 0
    assert (large["fits"], large["limited_by"]) == (False, "out_of_memory")
    assert (result["largest_size"], result["refused_size"]) == ([512, 512], [4096, 4096])
