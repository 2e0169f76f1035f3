"""Trainings in this process are on equal terms with those of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What ranks of one thread are compared with must sum in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_seed_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the house in this process sets Lightning's seed, which samplers read."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
