"""Pipelines with stages that are grids, whose ranks share one CUDA device over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import accumulation, exactness_cases, replayed_cases, synchronous_cases
from tests.support.exactness_cases import grid_rows, leaders, num_ranks
from tests.support.pipeline_cases import own_node
from tests.support.processes import run

RANKS = 3
ROWS = [row for row in grid_rows() if num_ranks(row) == RANKS]
ACCELERATOR, DEVICE = "gpu", torch.device("cuda", 0)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KINDS = {exactness_cases.Case: exactness_cases, synchronous_cases.Case: synchronous_cases}


def trained(rank: int) -> list[Any]:
    places = own_node(rank, RANKS, accelerator=ACCELERATOR)
    return [KINDS[type(row)].train(rank, [row], **places)[0] for row in ROWS]  # type: ignore[attr-defined]


def test_pipelines_equal_one_process() -> None:
    everyone = run(trained, RANKS, limit_s=240)
    for number, row in enumerate(ROWS):
        found = leaders([each[number] for each in everyone], row)
        if isinstance(row, synchronous_cases.Case):
            accumulation.check(row, found, device=DEVICE, rounding=1e-9)
        else:
            replayed_cases.check(row, found, device=DEVICE, rounding=1e-4)
