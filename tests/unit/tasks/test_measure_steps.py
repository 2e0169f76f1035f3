"""Budgets of counted memory, and sizes of samples."""

from __future__ import annotations

import pytest
import torch

from sparsepipe.errors import ConfigError
from sparsepipe.tasks.measure_steps import Limited, OverBudget, outcome, with_size
from tests.support.command_line import composed


def test_what_has_more_alive_than_it_may_is_ended_at_once() -> None:
    with Limited(100):
        held = [torch.zeros(8) for _ in range(3)]  # 32 bytes each
        with pytest.raises(OverBudget):
            torch.zeros(8)
    assert len(held) == 3
    with Limited(100):
        for _ in range(10):  # what is freed is no part of it
            torch.zeros(16)


def test_nothing_fits_where_the_first_size_does_not() -> None:
    found = outcome([{"size": [4], "peak_bytes": 9, "fits": False, "limited_by": "over_budget"}])
    assert (found["largest_size"], found["refused_size"]) == (None, [4])
    assert found["step_memory_bytes"] is None


def test_a_size_takes_the_place_of_the_data_s_own() -> None:
    spec = composed("data=volumes", "model=cnn3d")
    assert with_size(spec, (4, 5, 6)).data.get("source")["sizes"] == [4, 5, 6]
    with pytest.raises(ConfigError, match=r"data\.source\.sizes"):
        with_size(composed("data=shapes"), (4, 5, 6))
