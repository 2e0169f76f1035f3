"""The task of a run in the process at hand, which is one rank or the only one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.data.dataloaders import import_once_for_workers
from sparsepipe.errors import ConfigError, DataError, HardwareError, SparsePipeError, TransportError
from sparsepipe.launch.outcome import log_outcome
from sparsepipe.planning.devices import cuda_devices
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
from sparsepipe.utils.memory import keep_freed_memory


def execute(run: ResolvedRun) -> None:
    """Runs the task in this process, which is one rank or the only one.

    Raises:
        Stopped: a signal ended it; errors that the signal caused in passing are not reported.
        SparsePipeError: as what keeps a run that is to stop from writing its checkpoint.
        HardwareError: memory ran out.
    """
    quiet()
    limit_threads()
    import_once_for_workers()
    if run.inventory.accelerator == "cpu":
        keep_freed_memory()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # By another job of this process, whose peak is not this one's.
        torch.cuda.reset_peak_memory_stats()
    if run.ranks > 1:
        _join_group(run)
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
        if signum is not None and kept_from_saving(error):
            explain_unsaved(error, signum, run.directory)
            raise
        run.watch.raise_if_stopped(error)
        if (mendable := user_error(error, run)) is not None:
            raise mendable from error
        raise
    finally:
        end_tracking(failed=not done)
    if run.ranks > 1:
        process_group.leave()  # not after an error: it could wait for ranks that are gone


def _join_group(run: ResolvedRun) -> None:
    """Joins the process group of a run with several ranks."""
    parallel, rank = run.spec.parallel, process_group.rank()
    cuda = run.inventory.accelerator == "cuda"
    backend = parallel.argument("process_group_backend") or ("nccl" if cuda else "gloo")
    device = None
    if cuda and "nccl" in backend:  # this rank's device, as the Trainer will have it
        nodes = parallel.num_nodes
        indices = cuda_devices(run.places, run.inventory, rank=rank, nodes=nodes)
        device = torch.device("cuda", indices[process_group.local_rank()])
    process_group.join(backend, timeout_s=_timeout_s(run.spec), device=device)


def meet(spec: RunSpec) -> None:
    """Joins a gloo group in which ranks agree on the work before they know their devices; see
    ``renumber``.
    """
    process_group.join("gloo", timeout_s=_timeout_s(spec))


def _timeout_s(spec: RunSpec) -> float:
    return float(spec.parallel.argument("timeout_s", 300.0))


def explain_stop(stop: Stopped, directory: RunDir, spec: RunSpec) -> None:
    """Adds to a stop how to resume, and which ranks took too long to write a checkpoint."""
    again = "it again without force=true" if spec.force else "the same command again"
    ended = ""
    if stop.unresponsive:
        ended = (
            f"; ranks {', '.join(map(str, stop.unresponsive))} were ended after "
            f"{spec.parallel.grace_s} s without a checkpoint; {_last_one(directory)}; "
            "raise parallel.grace_s"
        )
    stop.message = f"stopped by {stop}{ended}; run {again} to go on"


def kept_from_saving(error: Exception) -> TypeGuard[SparsePipeError]:
    """Whether this error, not the signal, prevented the checkpoint of a stopped run."""
    # A signal to all processes breaks connections and ends loader workers in passing.
    broken_in_passing = isinstance(error, TransportError | DataError)
    return isinstance(error, SparsePipeError) and not broken_in_passing


def explain_unsaved(error: SparsePipeError, signum: int, directory: RunDir) -> None:
    """Adds to such an error that the run was stopping, and which checkpoint is left."""
    stop, why = signal.Signals(signum).name, error.message
    error.message = f"stopped by {stop} without a checkpoint: {why}; {_last_one(directory)}"
    error.remedy += "; then run the command again, without force=true, to go on"


@contextmanager
def failing_as_rank(directory: RunDir, spec: RunSpec) -> Iterator[None]:
    """Lets only the first rank that fails raise its error, with its number as a note.

    The others end at once. Since the agent ends all ranks with the first that ends, a rank ignores
    SIGTERM before it checks whether it is to report.
    """
    try:
        with _stopped_for_a_peer():
            yield
    except Stopped as stop:
        if stop.signum == signal.SIGTERM and process_group.any_rank_failed():
            raise SystemExit(stop.exit_code) from stop  # that one reports the error
        explain_stop(stop, directory, spec)
        raise
    except SparsePipeError as error:
        ignore(signal.SIGTERM)
        if not process_group.first_to_fail():
            raise SystemExit(error.exit_code) from error
        error.add_note(f"rank {process_group.rank()}")
        raise


@contextmanager
def _stopped_for_a_peer() -> Iterator[None]:
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


def user_error(error: Exception, run: ResolvedRun) -> SparsePipeError | None:
    """An error with a remedy for out-of-memory and the like; None for all others."""
    if isinstance(error, SparsePipeError):
        return None
    if _refused_by_lightning(error):
        return ConfigError(
            f"Lightning refuses the settings: {str(error).strip()}",
            remedy="correct the keys of trainer that it names",
        )
    filled = filled_share(None) if run.inventory.accelerator == "cuda" else 0.0
    if not ran_out(error, filled=filled):
        return None
    return HardwareError(
        f"{_whose(error, run)} ran out of memory: {memory_line(error)}",
        remedy="take smaller batches (data.batch_size; `sparsepipe task=fit_batch parallel=single` "
        "with the same data, model and optim finds the largest that fits), or a smaller model; or "
        "end other processes that hold memory",
    )


def _refused_by_lightning(error: Exception) -> bool:
    # What it finds out in the middle of fitting is a plain ValueError.
    late = isinstance(error, ValueError) and "`val_check_interval`" in str(error)
    return late or isinstance(error, MisconfigurationException)


def _whose(error: Exception, run: ResolvedRun) -> str:
    """The GPU or machine of an error and, if known, the operation."""
    rank, where = process_group.rank(), "this machine"
    if run.inventory.accelerator == "cuda" and not of_machine(error):
        where = run.spec.task.get("device") or run.places[rank].name
    doing = str(next(iter(getattr(error, "__notes__", ())), "")).removeprefix(f"rank {rank}, ")
    who = [f"rank {rank}"] * (run.ranks > 1) + [doing] * bool(doing)
    return f"{where} ({', '.join(who)})" if who else where


def limit_threads() -> None:
    """Limits this process's threads to its share of cores, unless the user has set a number: with a
    quota, torch would start too many.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())
