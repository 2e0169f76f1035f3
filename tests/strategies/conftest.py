"""Real ranks are started by the runtime's tests' own helper, on equal terms with a replay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "runtime"))


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
