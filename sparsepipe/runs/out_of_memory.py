"""Out-of-memory errors, and processes that the kernel has killed for lack of memory."""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from pathlib import Path

import torch

from sparsepipe.utils.host import group_files

_OF_MACHINE = ("can't allocate memory", "not enough memory", "bad_alloc")
"""Parts, in lower case, of messages of errors about the machine's memory."""
_OF_GPU = ("out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed")
"""Parts, in lower case, of messages of errors about a GPU's memory, also of CUDA's libraries."""
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_NO_ENGINE = "unable to find an engine"
"""cuDNN's error if no algorithm has enough workspace memory, or if none supports the operation."""


def ran_out(error: BaseException, *, filled: float = 0.0) -> bool:
    """Whether an error means that memory ran out.

    Args:
        error: error that a training step has raised.
        filled: peak share of the GPU's memory (or budget) that was in use. If it is at least 0.5,
            cuDNN's error that no engine exists means a lack of workspace memory; else that the GPU
            cannot compute the convolution at all.
    """
    if of_machine(error) or isinstance(error, torch.OutOfMemoryError):
        return True
    lacks_engine = filled >= 0.5 and _has(str(error), (_NO_ENGINE,))
    return lacks_engine or _has(str(error), _OF_GPU)


def of_machine(error: BaseException) -> bool:
    """Whether the error is about the machine's memory, not a GPU's."""
    return isinstance(error, MemoryError) or _has(str(error), _OF_MACHINE)


def memory_line(error: BaseException) -> str:
    """The line about memory in the error's message, which has many lines from a loader worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if _has(line, (*_OF_MACHINE, *_OF_GPU))]
    return (named or lines[-1:] or [type(error).__name__])[0]


def filled_share(budget_bytes: int | None) -> float:
    """Peak share of the GPU's memory, or of a smaller budget, that was in use; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return torch.cuda.max_memory_reserved() / min(whole, budget_bytes or whole)


def empty_device() -> None:
    """Frees torch's cached GPU memory, and resets its recorded peak and this process's limit."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats()


def _has(text: str, words: tuple[str, ...]) -> bool:
    return any(each in text.lower() for each in words)


def oom_kills() -> int | None:
    """Number of OOM kills so far in this process's control group, else on the machine; None if it
    is unknown.
    """
    for path in (*counters(), Path("/proc/vmstat")):
        with suppress(OSError, UnicodeDecodeError):
            if found := _KILLS.search(path.read_text(encoding="utf-8")):
                return int(found[1])
    return None


def kills_since(before: int | None) -> int | None:
    """Number of OOM kills since :func:`oom_kills` returned ``before``; None if it is unknown."""
    now = oom_kills()
    return None if now is None or before is None else now - before


def counters(own: str | None = None) -> list[Path]:
    """Files that count OOM kills of this process's control groups, nearest first.

    ``own`` is the text of ``/proc/self/cgroup``; None: it is read.
    """
    found = group_files("memory", ["memory.events"], ["memory.oom_control"], own=own)
    return [path for (path,) in found]
