"""The networks of the house on grids of ranks equal one process, in double precision."""

from __future__ import annotations

import pytest

from tests.support.processes import run_shared
from tests.support.spatial_networks import (
    cases,
    error_with_deep_supervision,
    error_with_empty_shards,
    errors,
)

BOUND = 1e-10


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "plain", [pytest.param(True, marks=pytest.mark.full), False], ids=["script", "step"]
)
def test_networks_equal_one_process(ranks: int, plain: bool) -> None:
    """Outputs, gradients, buffers; of steps of the classifier losses, metrics, predictions too."""
    for found in run_shared(errors, ranks, ranks, plain, limit_s=240):
        assert len(found) == len(list(cases()))
        assert {title: error for title, error in found.items() if not error <= BOUND} == {}


def test_deep_supervision_equals_one_process() -> None:
    assert max(run_shared(error_with_deep_supervision, 2)) <= BOUND


def test_ranks_with_empty_shards_compute_again_in_the_order_of_the_others() -> None:
    """A block whose last layer has fewer outputs than there are ranks, and exchanges halos."""
    assert max(run_shared(error_with_empty_shards, 2)) <= BOUND
