"""Which schedule a strategy's stages follow, by its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MICROBATCHES_KEY = "parallel.strategy.microbatches"
"""What says how many microbatches there are."""


@dataclass(frozen=True, slots=True)
class Synchronous:
    """A synchronous schedule.

    Args:
        schedule: its name, as simulations call it.
        microbatches: parts of a minibatch.
    """

    schedule: str
    microbatches: int

    @property
    def option(self) -> str:
        """What of ``parallel`` has it."""
        return "sync_1f1b" if self.schedule == "1f1b" else self.schedule


def synchronous_of(parallel: Mapping[str, Any]) -> Synchronous | None:
    """What ``parallel.strategy`` says; None where it is none of these.

    Args:
        parallel: resolved and checked.
    """
    strategy = parallel["strategy"] or {}
    if not {"schedule", "microbatches"} <= strategy.keys():
        return None
    return Synchronous(strategy["schedule"], strategy["microbatches"])
