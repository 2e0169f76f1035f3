"""A job, from its configuration to its finished run directory.

The process that composed the configuration prepares the data and the directory. The task then runs
in this process if it has only one rank, else in a process for each rank.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.emulate import NotPermitted, announce_hosts, clear, emulated_hosts, emulated_layout
from sparsepipe.errors import ConfigError, HardwareError, SparsePipeError
from sparsepipe.launch.execute import execute, explain_stop, failing_as_rank, timeout_s
from sparsepipe.launch.outcome import log_outcome
from sparsepipe.launch.prepare import (
    prepare,
    refuse_empty_microbatches,
    refuse_few_microbatches,
    resolve_run,
)
from sparsepipe.launch.renumber import renumber
from sparsepipe.planning.plan_resolution import resolve_plan
from sparsepipe.runs.disk import keep_checkpoints
from sparsepipe.runs.lock import keep_temporary_files_apart, locked, scratch
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.meeting_point import LOOPBACK
from sparsepipe.runtime.collectives.process_group import first_to_report
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.runtime.launch import launch, run_with_restarts
from sparsepipe.tasks.task import ResolvedRun
from sparsepipe.tracking.loggers import end_tracking
from sparsepipe.utils import reading
from sparsepipe.utils.files import read_mapping, writing
from sparsepipe.utils.host import git_commit, memory_bytes, usable_cores

log = logging.getLogger(__name__)


__all__ = ["Stopped", "first_to_report", "run_job"]

_RANK_BYTES = 400e6
"""Memory of a rank with the smallest model. Without a model, it has 340 MB of private memory with
PyTorch 2.13 on a CPU (``Private_*`` in ``/proc/PID/smaps_rollup``)."""


def run_job(
    spec: RunSpec,
    *,
    fresh_processes: bool = False,
    wait_s: float = 0.0,
    anew_since_s: float | None = None,
    found: Callable[[RunDir], object] = lambda directory: None,
) -> RunDir:
    """Runs a job, continues it if it has begun, or skips it if it is finished.

    Args:
        spec: the configuration.
        fresh_processes: whether to start a new process even for a single rank, as sweeps must.
        wait_s: how long to wait for another process that runs the same job, in seconds.
        anew_since_s: Unix time in seconds; a run that has finished since then is skipped even with
            ``force``; None: with ``force``, no run is skipped.
        found: called with the run's directory as soon as it is known, except under torchrun.

    Returns:
        The run's directory.

    Raises:
        SparsePipeError: the run failed for a reason that the user can correct.
        Stopped: a signal ended the run.
    """
    keep_temporary_files_apart()
    git_commit()  # now: the checkout may change while the run goes on
    run = resolve_run(spec)
    with run.watch:
        if process_group.started_externally():
            return _run_as_rank(run)
        smallest_bytes, most_bytes = run.ranks * _RANK_BYTES, memory_bytes()
        if most_bytes is not None and smallest_bytes > most_bytes:
            raise HardwareError(
                f"parallel.devices={run.ranks} takes {smallest_bytes / 1e9:,.1f} GB of memory "
                f"even with the smallest model, but this machine has {most_bytes / 1e9:,.1f} GB",
                remedy="lower hardware.cpu_devices or parallel.devices",
            )
        nodes, emulated = run.spec.parallel.num_nodes, run.spec.emulation is not None
        if nodes > 1 and not emulated:
            raise ConfigError(
                f"parallel.num_nodes={nodes}, but the command was started on this machine only",
                remedy="start the command on every node with torchrun",
            )
        run = prepare(run)
        found(run.directory)
        # Restarts need processes that can be ended, and emulated hosts need processes on them.
        processes = fresh_processes or run.spec.parallel.max_restarts > 0 or emulated
        with locked(run.directory, wait_s=wait_s):
            if not _finished(run, anew_since_s=anew_since_s):
                _run_here(run, alone=run.ranks == 1 and not processes)
        return run.directory


def _run_here(run: ResolvedRun, *, alone: bool) -> None:
    """Runs a job in its locked directory, in this process if ``alone``, else in new processes."""
    directory = run.directory
    with writing(directory.path):
        directory.open(run.spec)
    try:
        run = _with_plan(run, run_job=run_job)
        if alone:
            execute(run)
        else:
            _launch(run)
            if run.spec.emulation is not None:  # whose ranks have no access to a network
                try:
                    log_outcome(run)
                finally:
                    end_tracking(failed=False)
    except BaseException as error:
        if isinstance(error, Stopped):
            explain_stop(error, directory, run.spec)
        directory.remove_if_unused()
        if isinstance(error, Stopped) and error.save_error is not None:
            raise error.save_error from None
        raise
    _finish_run(run)


def _launch(run: ResolvedRun) -> None:
    """Starts a process per rank; restarts all after a failure, at most ``max_restarts`` times."""
    # A task with one rank may measure with the threads that a rank of several has.
    threads = max(1, usable_cores() // run.task.processes(run))
    division = run.division
    names = "rank {}".format if division is None else partial(division.name, ranks=run.ranks)
    # Not in the run's directory: its disk may be full, which must be reported.
    with scratch() as reports:

        def start() -> None:
            layout = emulated_layout()
            launch(
                [sys.executable, "-m", "sparsepipe.launch.worker", str(run.directory.path)],
                ranks=run.ranks,
                threads_per_rank=threads,
                reports=reports,
                grace_s=float(run.spec.parallel.grace_s),
                name=names,
                address=LOOPBACK if layout is None else layout.stations[0].launcher,
            )

        with hosts_emulated(run):
            run_with_restarts(start, max_restarts=run.spec.parallel.max_restarts)


def _run_as_rank(run: ResolvedRun) -> RunDir:
    """Runs a job as a rank that torchrun has started; rank 0 finds directory and plan for all."""
    # Data and plan are prepared before the group is joined, whose collectives have a time limit.
    process_group.assert_world_size(run.ranks)
    prepared = run
    with process_group.leader_first(of_host=True):
        if process_group.local_rank() == 0:
            prepared = prepare(run)
    with ExitStack() as held:
        decided: tuple[Path, bool] | SparsePipeError | None = None
        with process_group.leader_first(of_host=False):
            if process_group.rank() == 0:
                decided = _decide(prepared, held)
        # With Gloo, since ranks do not know their devices yet.
        process_group.join("gloo", timeout_s=timeout_s(run.spec))
        decided = process_group.broadcast_object(decided)
        if isinstance(decided, SparsePipeError):
            raise decided
        assert decided is not None
        directory = RunDir(decided[0])
        if decided[1]:
            process_group.leave()
            return directory
        with failing_as_rank(directory, run.spec):
            run = run.in_directory(directory)
            renumber(run)
            execute(run)
        if process_group.rank() == 0:
            _finish_run(run)
    return directory


def _decide(run: ResolvedRun, held: ExitStack) -> tuple[Path, bool] | SparsePipeError:
    """Returns the directory, locked while ``held`` is open, and whether it is done; or an error."""
    directory = run.directory
    try:
        held.enter_context(locked(directory))
        if _finished(run):
            return directory.path, True
        with writing(directory.path):
            directory.open(run.spec)
        try:
            _with_plan(run, run_job=None)
        except BaseException:
            directory.remove_if_unused()
            raise
    except SparsePipeError as error:
        return error
    return directory.path, False


def _with_plan(run: ResolvedRun, *, run_job: Callable[..., RunDir] | None) -> ResolvedRun:
    """Returns the run with the plan that its task adopts or a search finds, if it needs one."""
    run.task.adopt_plan(run)
    resolve_plan(run.spec, run.inventory, run.division, run.directory, run_job=run_job)
    run = run.in_directory(run.directory)
    refuse_few_microbatches(run)  # again, since some searches check neither
    refuse_empty_microbatches(run)
    return run


def _finished(run: ResolvedRun, *, anew_since_s: float | None = None) -> bool:
    directory = run.directory
    if not directory.done.exists():
        return False
    if run.spec.force and (
        anew_since_s is None
        or read_mapping(directory.done, time=reading.amount)["time"] < anew_since_s
    ):
        return False
    log.info(
        "finished before, nothing to do: the results are in %s; force=true starts anew",
        directory.path,
    )
    return True


def _finish_run(run: ResolvedRun) -> None:
    """Marks the run as finished, then removes checkpoints as ``trainer.checkpoints`` says."""
    directory = run.directory
    result = read_mapping(directory.result, kind=reading.name)
    directory.finish({"run_id": directory.run_id, "time": time.time(), "kind": result["kind"]})
    if directory.checkpoints.is_dir():
        log.info("%s", keep_checkpoints(directory, run.spec.trainer.checkpoints))


@contextmanager
def hosts_emulated(run: ResolvedRun) -> Iterator[None]:
    """Makes emulated hosts for the ranks that are started within the block.

    Makes none without emulation, with ``hardware.network=loopback``, or if all ranks are on one
    host. With ``network=auto``, if this process may not make hosts, a warning is logged, and all
    ranks stay on this machine's network. Leftovers of killed emulations are removed first.
    """
    emulation, names = run.spec.emulation, [place.host for place in run.places]
    used = tuple(host for host in run.inventory.hosts if host.name in names)
    with ExitStack() as stack:
        if emulation is not None:
            clear()
        if emulation is not None and emulation.network != "loopback" and len(used) > 1:
            cluster = replace(run.inventory, hosts=used)
            try:
                made = emulated_hosts(cluster, time_scale=emulation.time_scale)
                stack.enter_context(announce_hosts(stack.enter_context(made), names))
            except NotPermitted as error:
                if emulation.network == "namespaces":
                    raise
                log.warning(
                    "the network between hosts is not emulated: its links are as fast as this "
                    "machine's loopback, since %s; %s",
                    error.message,
                    error.remedy,
                )
        yield
