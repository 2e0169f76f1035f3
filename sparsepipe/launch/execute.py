"""Running a task in this process, which is one of several ranks or the only one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.dataloaders import import_once_for_workers
from sparsepipe.errors import ConfigError, DataError, HardwareError, SparsePipeError, TransportError
from sparsepipe.launch.outcome import log_outcome
from sparsepipe.runs.logs import quiet
from sparsepipe.runs.metrics import read_rows
from sparsepipe.runs.out_of_memory import filled_share, memory_line, of_machine, ran_out
from sparsepipe.runs.randomness import seed_model
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.signals import ignore
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.tracking.loggers import end_tracking
from sparsepipe.utils.host import usable_cores
from sparsepipe.utils.process import keep_freed_memory, set_matmul_precision

_DEAD_WORKER = re.compile(r"DataLoader worker \(pid.*(exited unexpectedly|killed by signal)")
"""Finds torch's error about a loader worker that has died."""


def execute(run: ResolvedRun) -> None:
    """Runs the task in this process, which is one of several ranks or the only one.

    Raises:
        Stopped: a signal ended the run; errors that the signal has caused are not reported.
        SparsePipeError: the task failed, possibly while it wrote the checkpoint after a signal.
    """
    quiet()
    limit_threads()
    set_matmul_precision(run.matmul_precision)
    import_once_for_workers()
    cuda = run.accelerator == "cuda"
    if not cuda:
        keep_freed_memory()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Another job of this process used the GPU: its peak must not count.
        torch.cuda.reset_peak_memory_stats()
    if run.ranks > 1:
        chosen = run.spec.parallel.argument("process_group_backend")
        backend = chosen or ("nccl" if cuda else "gloo")
        device = run.own_device if cuda and "nccl" in backend else None  # as the Trainer's
        process_group.join(backend, timeout_s=timeout_s(run.spec), device=device)
    process_group.assert_world_size(run.ranks)
    seed_model(int(run.spec.seed))
    done = False
    try:
        run.task.run(run)
        if run.spec.emulation is None:
            log_outcome(run)
        done = True
    except Exception as error:
        signum = run.watch.signum
        # A signal to all processes also breaks connections and ends loader workers.
        passing = isinstance(error, TransportError | DataError)
        if signum is not None and isinstance(error, SparsePipeError) and not passing:
            error.message = (
                f"stopped by {signal.Signals(signum).name} without a checkpoint: {error.message}; "
                f"{_last_checkpoint(run.directory)}"
            )
            error.remedy += "; then run the command again, without force=true, to go on"
            raise
        run.watch.raise_if_stopped(error)
        if (mendable := user_error(error, run)) is not None:
            raise mendable from error
        raise
    finally:
        end_tracking(failed=not done)
    if run.ranks > 1:
        process_group.leave()  # not after an error, since it may wait for ranks that are gone


def timeout_s(spec: RunSpec) -> float:
    """Longest time, in seconds, that a rank waits for other ranks."""
    return float(spec.parallel.argument("timeout_s", 300.0))


def explain_stop(stop: Stopped, directory: RunDir, spec: RunSpec) -> None:
    """Sets the message of ``stop``: how to resume, and which ranks wrote no checkpoint in time."""
    again = "it again without force=true" if spec.force else "the same command again"
    ended = ""
    if stop.unresponsive:
        ended = (
            f"; ranks {', '.join(map(str, stop.unresponsive))} were ended after "
            f"{spec.parallel.grace_s:g} s without a checkpoint; {_last_checkpoint(directory)}; "
            "raise parallel.grace_s"
        )
    stop.message = f"stopped by {stop}{ended}; run {again} to go on"


def _last_checkpoint(directory: RunDir) -> str:
    if not directory.last.exists():
        return "there is no checkpoint yet"
    return f"the last one includes at least {len(read_rows(directory.metrics))} epochs"


@contextmanager
def failing_as_rank(directory: RunDir, spec: RunSpec) -> Iterator[None]:
    """Lets only the first rank that fails in the block raise its error, and notes its rank in it.

    Other ranks that fail exit at once. Since torchrun's agent sends SIGTERM to all ranks when one
    has ended, a rank ignores that signal before it checks whether it is the first.
    """
    try:
        yield
        return
    except Stopped as stop:
        if stop.signum == signal.SIGTERM and isinstance(stop.__cause__, TransportError):
            error: SparsePipeError = stop.__cause__
        elif stop.signum == signal.SIGTERM and process_group.other_rank_failed(announced=False):
            raise SystemExit(stop.exit_code) from stop  # the other rank reports the error
        else:
            explain_stop(stop, directory, spec)
            raise
    except SparsePipeError as caught:
        error = caught
    ignore(signal.SIGTERM)
    if process_group.other_rank_failed(announced=True):
        raise SystemExit(error.exit_code) from error
    error.add_note(f"rank {process_group.rank()}")
    raise error


def user_error(error: Exception, run: ResolvedRun) -> SparsePipeError | None:
    """Returns an error with a remedy for what users can mend, such as lack of memory, else None."""
    if isinstance(error, SparsePipeError):
        return None
    if isinstance(error, RuntimeError) and _DEAD_WORKER.match(str(error)):
        of_rank = f" of rank {process_group.rank()}" if run.ranks > 1 else ""
        return SparsePipeError(
            f"a process that reads data{of_rank} ended: {str(error).strip()}",
            remedy="check whether the machine ran out of memory or the process was stopped "
            "(data.num_workers=0 reads without such processes); then run the command again, "
            "without force=true, to go on from the last checkpoint",
        )
    # Lightning raises a plain ValueError for settings that it checks during the fit.
    late = isinstance(error, ValueError) and "`val_check_interval`" in str(error)
    if late or isinstance(error, MisconfigurationException):
        return ConfigError(
            f"Lightning refuses the settings: {str(error).strip()}",
            remedy="correct the keys of trainer that Lightning names",
        )
    cuda = run.accelerator == "cuda"
    if not ran_out(error, filled=filled_share(None) if cuda else 0.0):
        return None
    rank, where = process_group.rank(), "this machine"
    if cuda and not of_machine(error):
        where = run.spec.task.get("device") or run.places[rank].name
    doing = str(next(iter(getattr(error, "__notes__", ())), "")).removeprefix(f"rank {rank}, ")
    who = [f"rank {rank}"] * (run.ranks > 1) + [doing] * bool(doing)
    whose = f"{where} ({', '.join(who)})" if who else where
    return HardwareError(
        f"{whose} ran out of memory: {memory_line(error)}",
        remedy="use smaller batches (data.batch_size; `sparsepipe task=fit_batch parallel=single` "
        "with the same data, model and optim finds the largest that fits) or a smaller model, or "
        "end other processes that hold memory",
    )


def limit_threads() -> None:
    """Unless OMP_NUM_THREADS is set, limits torch's threads by a CPU quota, which torch ignores."""
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())
