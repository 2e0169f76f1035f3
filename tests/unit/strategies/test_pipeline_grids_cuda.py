"""Pipelines with stages that are grids, whose ranks share one CUDA device over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import accumulation, exactness_cases, replayed_cases, synchronous_cases
from tests.support.pipeline_cases import own_node
from tests.support.processes import run
from tests.unit.strategies.test_pipeline_grids import ASYNCHRONOUS, SYNCHRONOUS, leaders

RANKS = 3
ACCELERATOR, DEVICE = "gpu", torch.device("cuda", 0)
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND, ROUNDING = 1e-9, 1e-4


def trained(rank: int) -> tuple[list[Any], list[Any]]:
    places = own_node(rank, RANKS, accelerator=ACCELERATOR)
    return (
        synchronous_cases.train(rank, SYNCHRONOUS[RANKS], **places),
        exactness_cases.train(rank, ASYNCHRONOUS[RANKS], **places),
    )


def test_pipelines_equal_one_process() -> None:
    everyone = run(trained, RANKS, limit_s=240)
    for number, case in enumerate(SYNCHRONOUS[RANKS]):
        found = leaders([each[0][number] for each in everyone], case.config, case.grids)
        accumulation.check(case, found, device=DEVICE, rounding=BOUND)
    for number, case in enumerate(ASYNCHRONOUS[RANKS]):
        found = leaders([each[1][number] for each in everyone], case.config, case.grids)
        replayed_cases.check(case, found, device=DEVICE, rounding=ROUNDING)
