"""What a person should know of a run that a signal has stopped."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any, TypeGuard

from sparsepipe.errors import DataError, SparsePipeError, TransportError
from sparsepipe.experiment.callbacks.metrics_csv import read_rows
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.runtime.launch import Stopped


def tell_stop(stop: Stopped, directory: RunDir, config: Mapping[str, Any]) -> None:
    """Says with a stop how to go on, and what was lost where ranks took too long."""
    again = "it again without force=true" if config["force"] else "the same command again"
    lost = ""
    if stop.unheard:
        lost = (
            f"; ranks {', '.join(map(str, stop.unheard))} were ended after "
            f"{config['parallel']['grace_s']} s without a checkpoint; {_last_one(directory)}; "
            "raise parallel.grace_s"
        )
    stop.message = f"stopped by {stop}{lost}; run {again} to go on"


def kept_from_saving(error: Exception) -> TypeGuard[SparsePipeError]:
    """Whether this, and not the signal, is why a run that was to stop wrote no checkpoint."""
    # A signal to all processes breaks connections and ends loader workers in passing.
    broken_in_passing = isinstance(error, TransportError | DataError)
    return isinstance(error, SparsePipeError) and not broken_in_passing


def tell_loss(error: SparsePipeError, signum: int, directory: RunDir) -> None:
    """Says with such an error what the run was about to do, and what is left of it."""
    stop, why = signal.Signals(signum).name, error.message
    error.message = f"stopped by {stop} without a checkpoint: {why}; {_last_one(directory)}"
    error.remedy += "; then run the command again, without force=true, to go on"


def _last_one(directory: RunDir) -> str:
    if not directory.last.exists():
        return "there is no checkpoint yet"
    return f"the last one is of epoch {len(read_rows(directory.metrics))} or later"
