"""The threads that somebody has chosen for a processor: part of what a run on one device is.

A processor computes on all cores, or on as many threads as ``OMP_NUM_THREADS`` says: how long it
takes with one says nothing of another number. To say what is so anyhow is no choice. Several ranks
share the cores in any case, and launchers (``torchrun`` too) set the variable for them: there it is
no choice of anybody's.
"""

from __future__ import annotations

import os

import torch

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.sweep_directory import announced_threads
from sparsepipe.utils.host import usable_cores


def limit_threads() -> None:
    """Lets this process have no more threads than cores, where nobody says how many.

    Torch starts as many as there are cores to run on; with a quota that is worth fewer they would
    stop each other.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())


def chosen_threads(spec: RunSpec, inventory: Inventory, *, ranks: int) -> str | None:
    """Of a run, as somebody has chosen them; None where nobody has, or where they do not count.

    They do not where a task's own ``prepare`` says what it depends on, or where ``threads`` are
    among its ``not_identity``.
    """
    task = spec.task.locate()
    of_task = not hasattr(task, "prepare") and "threads" not in getattr(task, "not_identity", ())
    counts = of_task and ranks == 1 and inventory.accelerator == "cpu"
    return announced_threads() if counts else None
