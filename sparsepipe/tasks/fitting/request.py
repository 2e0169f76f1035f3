"""What a probe is asked, and exit statuses by which it answers where it cannot take the steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsepipe.config.run_spec import RunSpec

OVER_BUDGET, OUT_OF_MEMORY, TOO_FEW_SHAPES = 91, 92, 93
"""Exit statuses; the last one where the data have no batch of the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a probe is asked.

    Args:
        spec: the configuration.
        batch_size: in place of the configuration's.
        budget_bytes: that may be taken; None: all that a GPU has.
        steps: of training.
        isolated: the steps are taken in a process of their own.
        whole: batches have to be of that size; else those of data with too few shapes do, as in a
            training.
        answer: the file to answer by.
        parent: the process that asks, without which there is nobody to answer.
    """

    spec: RunSpec
    batch_size: int
    budget_bytes: int | None
    steps: int
    isolated: bool
    whole: bool
    answer: Path
    parent: int

    @property
    def seen(self) -> Path:
        """The file that tells the most memory it was seen to have, whatever ends it.

        Two numbers of bytes: then, and when its steps began.
        """
        return self.answer.with_name("seen")
