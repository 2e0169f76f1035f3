"""A probe: ``python -m sparsepipe.tasks.fitting.probe <directory>`` takes real training steps.

It is a separate process, so that only its memory is measured, and running out of memory harms
nothing else. It writes a file ``answer``; over the budget, it ends at once with an exit status.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from sparsepipe.errors import SparsePipeError
from sparsepipe.tasks.fitting.memory import OUT_OF_MEMORY, TOO_FEW_SHAPES, prefer_as_victim
from sparsepipe.utils.process import end_with_parent


def main() -> None:
    """Takes the steps that the file ``request`` in the directory on the command line describes."""
    place = Path(sys.argv[1])
    parent: int = pickle.loads((place / "parent").read_bytes())
    end_with_parent(parent)  # first: importing torch takes seconds
    prefer_as_victim()
    from sparsepipe.runs.logs import quiet
    from sparsepipe.runs.out_of_memory import filled_share, ran_out
    from sparsepipe.tasks.fitting.prober import TooFewShapes, memory_of_steps

    quiet()
    request = pickle.loads((place / "request").read_bytes())
    answer: int | SparsePipeError
    try:
        answer = memory_of_steps(**request)
    except SparsePipeError as error:
        answer = error
    except TooFewShapes:
        os._exit(TOO_FEW_SHAPES)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error, filled=filled_share(request["budget_bytes"])):
            raise
        os._exit(OUT_OF_MEMORY)  # skips torch's teardown
    (place / "answer").write_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main()
