"""Errors of probes that leave no answer: whether the steps fit is not known."""

from __future__ import annotations

from sparsepipe.errors import HardwareError, SparsePipeError

_SAID_LINES = 20


def endless(process: int, *, limit_s: float) -> SparsePipeError:
    """Of a process that is there so long after it was killed."""
    return HardwareError(
        f"process {process}, which tried out a batch size, was killed and is there all the same "
        f"{limit_s:g} s later",
        remedy="the kernel holds it, most often for a GPU's driver or a network file system that "
        "hangs: see dmesg, and restart the machine where nothing else helps; the same command goes "
        "on with the search",
    )


def too_slow(batch_size: int, timeout_s: float) -> SparsePipeError:
    """Of steps that were ended at their limit."""
    return SparsePipeError(
        f"training steps of batch size {batch_size} took longer than task.timeout_s={timeout_s:g}: "
        "whether they fit is not known",
        remedy="raise task.timeout_s: the same run goes on, with the answers that it has",
    )


def killed(batch_size: int, *, times: int, for_memory: bool) -> SparsePipeError:
    """Of steps that somebody killed, each time.

    Args:
        batch_size: of the steps.
        times: they were tried.
        for_memory: by the OOM killer, as far as anybody knows.
    """
    why = "most often for memory that others had taken" if for_memory else "not for memory"
    return SparsePipeError(
        f"training steps of batch size {batch_size} were killed (signal 9) {times} times, {why}: "
        "whether they fit is not known",
        remedy="end what else takes memory, or find out who kills them; the same command goes on "
        "with the search, with the answers that it has",
    )


def broken(batch_size: int, code: int, said: str) -> SparsePipeError:
    """Of steps that failed in another way.

    Args:
        batch_size: of the steps.
        code: exit status; negative for a signal.
        said: by the process.
    """
    lines = "\n".join(said.strip().splitlines()[-_SAID_LINES:])
    end = f"signal {-code}" if code < 0 else f"exit status {code}"
    return SparsePipeError(
        f"training steps of batch size {batch_size} ended with {end}, not for memory:\n{lines}",
        remedy="mend what it says; the same command goes on with the search",
    )
