"""A probe: ``python -m sparsepipe.tasks.fitting.probe <request>`` takes real training steps.

It is a process of its own, so that what it needs is its own, and what it breaks, too. It answers by
a file; where its memory passes the budget it ends at once and answers by its exit status.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from sparsepipe.errors import SparsePipeError
from sparsepipe.runtime.launch import follow_parent
from sparsepipe.tasks.fitting.memory import prefer_as_victim
from sparsepipe.tasks.fitting.request import OUT_OF_MEMORY, TOO_FEW_SHAPES, Request


def main() -> None:
    """Takes the steps of the request given on the command line."""
    request: Request = pickle.loads(Path(sys.argv[1]).read_bytes())
    follow_parent(parent=request.parent)  # first: torch takes seconds to come
    prefer_as_victim()
    answer = _answer(request)
    request.answer.write_bytes(pickle.dumps(answer))


def _answer(request: Request) -> int | SparsePipeError:
    from sparsepipe.runs.logs import quiet
    from sparsepipe.runs.out_of_memory import filled_share, ran_out
    from sparsepipe.tasks.fitting.steps import TooFewShapes, memory_of_steps

    quiet()
    try:
        return memory_of_steps(request)
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
