"""A probe: ``python -m sparsepipe.tasks.fitting.probe <request>`` takes real training steps.

It is a process of its own, so that what it needs is its own, and what it breaks, too. It answers by
a file; where its memory passes the budget it ends at once and answers by its exit status.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import SparsePipeError
from sparsepipe.tasks.fitting.memory import prefer_as_victim
from sparsepipe.utils.parent import end_with_parent

OUT_OF_MEMORY, TOO_FEW_SHAPES = 92, 93
"""Exit statuses; the last one where the data have no batch of the size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The training steps that a probe is to take.

    Args:
        spec: the configuration.
        batch_size: in place of the configuration's.
        budget_bytes: that may be taken; None: all that a GPU has.
        steps: of training.
        isolated: the steps are taken in a process of their own.
        whole: batches have to be of that size; else those of data with too few shapes do, as in a
            training.
        answer: the file to answer by.
        parent: the process that started it, without which there is nobody to answer.
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
        """The file with two numbers: most memory seen and memory when the steps began, in bytes."""
        return self.answer.with_name("seen")

    def take_steps(self) -> int:
        """Takes the steps in this process; the most memory that they took, in bytes.

        Raises:
            SparsePipeError: something a user can mend.
            TooFewShapes: there is no batch of that size, and batches have to be whole.
        """
        from sparsepipe.tasks.fitting.steps import memory_of_steps

        return memory_of_steps(
            self.spec,
            batch_size=self.batch_size,
            budget_bytes=self.budget_bytes,
            steps=self.steps,
            isolated=self.isolated,
            whole=self.whole,
            place=self.answer.parent,
        )


def main() -> None:
    """Takes the steps of the request given on the command line."""
    request: Request = pickle.loads(Path(sys.argv[1]).read_bytes())
    end_with_parent(request.parent)  # first: torch takes seconds to come
    prefer_as_victim()
    answer = _answer(request)
    request.answer.write_bytes(pickle.dumps(answer))


def _answer(request: Request) -> int | SparsePipeError:
    from sparsepipe.runs.logs import quiet
    from sparsepipe.runs.out_of_memory import filled_share, ran_out
    from sparsepipe.tasks.fitting.steps import TooFewShapes

    quiet()
    try:
        return request.take_steps()
    except SparsePipeError as error:
        return error
    except TooFewShapes:
        os._exit(TOO_FEW_SHAPES)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error, filled=filled_share(request.budget_bytes)):
            raise
        os._exit(OUT_OF_MEMORY)  # what is left of torch need not be taken apart


if __name__ == "__main__":
    main()
