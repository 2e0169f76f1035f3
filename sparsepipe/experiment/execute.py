"""The task of a run in the process at hand, which is one rank or the only one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.experiment import out_of_memory
from sparsepipe.experiment.emulation import emulation_of
from sparsepipe.experiment.joining import joined
from sparsepipe.experiment.loggers import end_tracking
from sparsepipe.experiment.logs import quiet
from sparsepipe.experiment.outcome import log_outcome
from sparsepipe.experiment.run import Run
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.experiment.seeding import seed_model
from sparsepipe.experiment.signals import SignalWatch
from sparsepipe.experiment.signature import locate
from sparsepipe.experiment.stopping import kept_from_saving, tell_loss
from sparsepipe.runtime import group


def execute(
    directory: RunDir, config: Mapping[str, Any], inventory: Inventory, watch: SignalWatch
) -> None:
    """Runs the task in this process, which is one rank or the only one.

    Raises:
        Stopped: a signal ended it; whatever the signal broke in passing is not told.
        SparsePipeError: as what keeps a run that is to stop from writing its checkpoint.
        HardwareError: memory ran out.
    """
    quiet()
    run = Run(config=config, directory=directory, inventory=inventory, watch=watch)
    with _group(run):
        group.assert_world_size(run.ranks)
        seed_model(int(config["seed"]))
        node = dict(config["task"])
        task = locate(node.pop("_target_"))
        done = False
        try:
            task(run, **node)
            if emulation_of(config) is None:
                log_outcome(run)
            done = True
        except Exception as error:
            if watch.signum is not None and kept_from_saving(error):
                tell_loss(error, watch.signum, directory)
                raise
            watch.stop_if_asked(error)
            if (told := _told(error, run)) is not None:
                raise told from error
            raise
        finally:
            end_tracking(failed=not done)


def _told(error: Exception, run: Run) -> SparsePipeError | None:
    """What a user can mend, of errors that others raised; None of what is somebody's own."""
    if _refused_by_lightning(error):
        return ConfigError(
            f"Lightning refuses the settings: {str(error).strip()}",
            remedy="correct the keys of trainer that it names",
        )
    return out_of_memory.told(error, run)


def _refused_by_lightning(error: Exception) -> bool:
    # What it finds out in the middle of fitting is a plain ValueError.
    late = isinstance(error, ValueError) and "`val_check_interval`" in str(error)
    return late or isinstance(error, MisconfigurationException)


@contextmanager
def _group(run: Run) -> Iterator[None]:
    """The process group of a run with several ranks."""
    if run.ranks == 1:
        yield
        return
    with joined(run.config, run.inventory, kept=run.directory.plan):
        yield
