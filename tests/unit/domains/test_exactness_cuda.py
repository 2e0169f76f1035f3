"""Domains on ranks that share one CUDA device over gloo train as one process on it does."""

from __future__ import annotations

import pytest
import torch

from tests.support.domain_cases import Case, gap, parallel_on, plain
from tests.support.processes import run_shared

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUND = 1e-10
"""Sums of atomic additions come in any order."""


@pytest.mark.parametrize(
    "case",
    [
        Case(similarity="mmd"),
        Case(kind="sparse", norm="all"),
        Case(targets=2, ranks=3, clip=0.1),
        Case(ranks=3, roles="separate"),
        Case(kind="3d", grid=(1, 1, 2), ranks=4),
    ],
    ids=str,
)
def test_equal_one_process(case: Case) -> None:
    expected, logged = plain(case, accelerator="cuda")
    for state, values in run_shared(parallel_on, case.ranks, "cuda", case):
        assert max(gap(state, expected).values()) <= BOUND
        assert values == {name: pytest.approx(each, rel=1e-6) for name, each in logged.items()}
