"""Errors that say that there is no memory left, and what a user can do about them."""

from __future__ import annotations

import torch

from sparsepipe.errors import HardwareError, SparsePipeError
from sparsepipe.experiment.run import Run
from sparsepipe.runtime import group

_REFUSALS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
"""Words of errors, in lower case; near a full GPU libraries have their own."""
_NO_ENGINE = "unable to find an engine"
"""Of cuDNN, where none of its ways has the memory that it works in, or where it has none at all."""


def ran_out(error: BaseException, *, filled: float = 0.0) -> bool:
    """Whether an error says that there is no memory left.

    Args:
        error: of a training step.
        filled: share of what a GPU may give that was taken at most. It tells a convolution that has
            no memory to work in, at half or more, from one that the GPU cannot do.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return any(words in said for words in _REFUSALS) or (_NO_ENGINE in said and filled >= 0.5)


def filled_share(budget_bytes: int | None) -> float:
    """Of the GPU's memory, or of the budget of it, what was taken at most; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return torch.cuda.max_memory_reserved() / min(whole, budget_bytes or whole)


def told(error: Exception, run: Run) -> HardwareError | None:
    """What to tell of an error for want of memory, with its remedy; None of another error.

    Args:
        error: what a task raised; what tells a remedy already is none of these.
        run: whose task.
    """
    cuda = run.inventory.accelerator == "cuda"
    if isinstance(error, SparsePipeError) or not ran_out(
        error, filled=filled_share(None) if cuda else 0.0
    ):
        return None
    size = run.config["data"].get("batch_size")
    with_batch = "" if size is None else f" with data.batch_size={size}"
    return HardwareError(
        f"{_whose(error, run)} ran out of memory{with_batch}: {_line(error)}",
        remedy="take smaller batches (data.batch_size): `sparsepipe task=fit_batch "
        "parallel=single` with the same data, model and optim finds the largest that fits; or end "
        "other processes that hold memory",
    )


def _whose(error: Exception, run: Run) -> str:
    """The device and, where that is known, what was done on it."""
    rank = group.rank()
    doing = str(next(iter(getattr(error, "__notes__", ())), "")).removeprefix(f"rank {rank}, ")
    who = [f"rank {rank}"] * (run.ranks > 1) + [doing] * bool(doing)
    name = run.places[rank].name
    return f"{name} ({', '.join(who)})" if who else name


def _line(error: Exception) -> str:
    """What it says of that: of several lines, as loader workers' have, the one with such words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if any(words in line.lower() for words in _REFUSALS)]
    return (named or lines[-1:] or [type(error).__name__])[0]
