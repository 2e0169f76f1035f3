"""What users are told of errors that others raised and that they can mend."""

from __future__ import annotations

from lightning_fabric.utilities.exceptions import MisconfigurationException

from sparsepipe.errors import ConfigError, HardwareError, SparsePipeError
from sparsepipe.runs.out_of_memory import filled_share, of_machine, ran_out, telling_line
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.run import Run

_ON_BATCHES = ("evaluate", "profile", "train", "train_if_fits")
"""Tasks that compute on batches of the data, which an emulated training does not."""


def told(error: Exception, run: Run) -> SparsePipeError | None:
    """An error with its remedy; None of what tells one already, or is somebody's own.

    Args:
        error: what a task raised.
        run: whose task.
    """
    if isinstance(error, SparsePipeError):
        return None
    if _refused_by_lightning(error):
        return ConfigError(
            f"Lightning refuses the settings: {str(error).strip()}",
            remedy="correct the keys of trainer that it names",
        )
    filled = filled_share(None) if run.inventory.accelerator == "cuda" else 0.0
    return _no_memory(error, run) if ran_out(error, filled=filled) else None


def _refused_by_lightning(error: Exception) -> bool:
    # What it finds out in the middle of fitting is a plain ValueError.
    late = isinstance(error, ValueError) and "`val_check_interval`" in str(error)
    return late or isinstance(error, MisconfigurationException)


def _no_memory(error: Exception, run: Run) -> HardwareError:
    ours = f"{_whose(error, run)} ran out of memory"
    size = run.spec.data.get("batch_size") if run.task_name in _ON_BATCHES else None
    if size is None:
        return HardwareError(
            f"{ours}: {telling_line(error)}",
            remedy="end other processes that hold memory, or ask for less of it by the keys that "
            "`sparsepipe --cfg job` prints",
        )
    return HardwareError(
        f"{ours} with data.batch_size={size}: {telling_line(error)}",
        remedy="take smaller batches (data.batch_size): `sparsepipe task=fit_batch "
        "parallel=single` with the same data, model and optim finds the largest that fits; or end "
        "other processes that hold memory",
    )


def _whose(error: Exception, run: Run) -> str:
    """The GPU or the machine and, where that is known, what was done on it."""
    rank, where = process_group.rank(), "this machine"
    if run.inventory.accelerator == "cuda" and not of_machine(error):
        where = run.spec.task.get("device") or run.places[rank].name
    doing = str(next(iter(getattr(error, "__notes__", ())), "")).removeprefix(f"rank {rank}, ")
    who = [f"rank {rank}"] * (run.ranks > 1) + [doing] * bool(doing)
    return f"{where} ({', '.join(who)})" if who else where
