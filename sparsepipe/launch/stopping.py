"""What a person should know of a run that a signal or a rank has stopped, told by one rank."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import TypeGuard

from sparsepipe.callbacks.metrics_csv import read_rows
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.errors import DataError, SparsePipeError, TransportError
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.signals import ignore
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.rank_reports import Stopped


def tell_stop(stop: Stopped, directory: RunDir, spec: RunSpec) -> None:
    """Says with a stop how to go on, and what was lost where ranks took too long."""
    again = "it again without force=true" if spec.force else "the same command again"
    lost = ""
    if stop.unresponsive:
        lost = (
            f"; ranks {', '.join(map(str, stop.unresponsive))} were ended after "
            f"{spec.parallel.grace_s} s without a checkpoint; {_last_one(directory)}; "
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


@contextlib.contextmanager
def failing_as_rank(directory: RunDir, spec: RunSpec) -> Iterator[None]:
    """Lets the first rank that fails tell why, with its number as a note, and no other.

    The others end at once, and with the first that ends the agent ends all: whoever asks
    whether it is to tell must have stopped to heed that.
    """
    try:
        with _stopped_for_a_peer():
            yield
    except Stopped as stop:
        if stop.signum == signal.SIGTERM and process_group.any_rank_failed():
            raise SystemExit(stop.exit_code) from stop  # for what that one tells
        tell_stop(stop, directory, spec)
        raise
    except SparsePipeError as error:
        ignore(signal.SIGTERM)
        if not process_group.first_to_fail():
            raise SystemExit(error.exit_code) from error
        error.add_note(f"rank {process_group.rank()}")
        raise


@contextlib.contextmanager
def _stopped_for_a_peer() -> Iterator[None]:
    """Turns the agent's SIGTERM into what this rank had noticed already: whom it misses.

    The agent sends it to all when one rank is gone, often before they have said so.
    """
    try:
        yield
    except Stopped as stop:
        if stop.signum == signal.SIGTERM and isinstance(stop.__cause__, TransportError):
            raise stop.__cause__ from None
        raise


def _last_one(directory: RunDir) -> str:
    if not directory.last.exists():
        return "there is no checkpoint yet"
    return f"the last one is of epoch {len(read_rows(directory.metrics))} or later"
