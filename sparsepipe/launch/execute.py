"""The task of a run in the process at hand, which is one rank or the only one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sparsepipe.cluster import Inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.loading import import_once_for_workers
from sparsepipe.launch.error_messages import told
from sparsepipe.launch.joining import joined
from sparsepipe.launch.outcome import log_outcome
from sparsepipe.launch.stopping import kept_from_saving, tell_loss
from sparsepipe.launch.threads import limit_threads
from sparsepipe.runs.logs import quiet
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.seeding import seed_model
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.tasks.run import Run
from sparsepipe.tracking.loggers import end_tracking
from sparsepipe.utils.memory import keep_freed_memory


def execute(directory: RunDir, spec: RunSpec, inventory: Inventory, watch: SignalWatch) -> None:
    """Runs the task in this process, which is one rank or the only one.

    Raises:
        Stopped: a signal ended it; whatever the signal broke in passing is not told.
        SparsePipeError: as what keeps a run that is to stop from writing its checkpoint.
        HardwareError: memory ran out.
    """
    quiet()
    limit_threads()
    import_once_for_workers()
    if inventory.accelerator == "cpu":
        keep_freed_memory()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # By another job of this process, whose peak is not this one's.
        torch.cuda.reset_peak_memory_stats()
    run = Run(spec=spec, directory=directory, inventory=inventory, watch=watch)
    with _group(run):
        process_group.assert_world_size(run.ranks)
        seed_model(int(spec.seed))
        task = spec.task.locate()
        done = False
        try:
            task(run, **spec.task.arguments)
            if spec.emulation is None:
                log_outcome(run)
            done = True
        except Exception as error:
            if watch.signum is not None and kept_from_saving(error):
                tell_loss(error, watch.signum, directory)
                raise
            watch.stop_if_asked(error)
            if (mendable := told(error, run)) is not None:
                raise mendable from error
            raise
        finally:
            end_tracking(failed=not done)


@contextmanager
def _group(run: Run) -> Iterator[None]:
    """The process group of a run with several ranks."""
    if run.ranks == 1:
        yield
        return
    with joined(run.spec, run.inventory, kept=run.directory.plan):
        yield
