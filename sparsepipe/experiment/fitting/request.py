"""What a probe is asked, and the exit statuses by which it answers where it has no memory left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OVER_BUDGET, OUT_OF_MEMORY = 91, 92
"""Exit statuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a probe is asked.

    Args:
        config: resolved and checked; of a run with one device.
        batch_size: in place of the configuration's.
        budget_bytes: that may be taken; None: all that a GPU has.
        steps: of training.
        answer: the file to answer by.
        parent: the process that asks, without which there is nobody to answer.
    """

    config: Mapping[str, Any]
    batch_size: int
    budget_bytes: int | None
    steps: int
    answer: Path
    parent: int
