"""One job from its configuration to its finished run directory.

The process that composed the configuration prepares data and directory; ranks then run
the task, in this process where there is one rank only, else in processes of their own.
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

from sparsepipe.cluster import Inventory
from sparsepipe.config.division import division_of
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.emulate import (
    NotPermitted,
    announce_hosts,
    clear,
    emulated_hosts,
    emulated_layout,
)
from sparsepipe.errors import ConfigError, HardwareError, SparsePipeError
from sparsepipe.launch.execute import execute, explain_stop, failing_as_rank, meet
from sparsepipe.launch.outcome import log_outcome
from sparsepipe.launch.prepare import (
    prepare,
    refuse_empty_microbatches,
    refuse_few_microbatches,
    resolve_run,
)
from sparsepipe.launch.renumber import renumber
from sparsepipe.planning.devices import places_of_ranks
from sparsepipe.planning.plan_resolution import resolve_plan
from sparsepipe.runs.disk import keep_checkpoints
from sparsepipe.runs.lock import keep_temporary_files_apart, locked, scratch
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.meeting_point import LOOPBACK
from sparsepipe.runtime.collectives.process_group import first_to_report
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.runtime.launch import launch, run_with_restarts
from sparsepipe.tasks.task import Run, num_ranks, task_of
from sparsepipe.tracking.loggers import end_tracking
from sparsepipe.utils import reading
from sparsepipe.utils.files import read_mapping, writing
from sparsepipe.utils.host import git_commit, memory_bytes, usable_cores

log = logging.getLogger(__name__)


__all__ = ["Stopped", "first_to_report", "run_job"]

_RANK_BYTES = 400e6
"""That a rank takes with the smallest of models. Measured before it has one, by PyTorch 2.13 on a
processor: 340 MB of private memory (``Private_*`` of ``/proc/PID/smaps_rollup``)."""


def run_job(
    spec: RunSpec,
    *,
    fresh_processes: bool = False,
    wait_s: float = 0.0,
    anew_since_s: float | None = None,
    found: Callable[[RunDir], object] = lambda directory: None,
) -> RunDir:
    """Runs a job, or skips it when it is finished, or goes on with it.

    Args:
        spec: the configuration.
        fresh_processes: start a process even for a single rank, as sweeps must.
        wait_s: how long to wait for another process that does the same job.
        anew_since_s: a run that has finished since then (seconds since 1970) counts as one that
            ``force`` has started anew already.
        found: called with the run's directory as soon as that is known.

    Returns:
        The run's directory, finished.

    Raises:
        SparsePipeError: something a user can mend.
        Stopped: a signal ended the run.
    """
    keep_temporary_files_apart()
    git_commit()  # now: the checkout may change while the run goes on
    spec, inventory, ranks = resolve_run(spec)
    with SignalWatch() as watch:
        if process_group.started_externally():
            return _run_as_rank(spec, inventory, watch, ranks)
        # Restarts need processes that can be ended.
        processes = fresh_processes or spec.parallel.max_restarts > 0
        alone = ranks == 1 and not processes and spec.emulation is None
        _refuse_more_than_fit(ranks)
        directory = _prepare_here(spec, inventory)
        found(directory)
        with locked(directory, wait_s=wait_s):
            if not _finished(directory, spec, anew_since_s=anew_since_s):
                _run_here(directory, spec, inventory, watch, alone=alone)
        return directory


def _refuse_more_than_fit(ranks: int) -> None:
    total_bytes = memory_bytes()
    if total_bytes is not None and ranks * _RANK_BYTES > total_bytes:
        raise HardwareError(
            f"{ranks} ranks take {ranks * _RANK_BYTES / 1e9:,.1f} GB of memory with the smallest "
            f"of models, and this machine has {total_bytes / 1e9:,.1f} GB",
            remedy="take fewer: lower hardware.cpu_devices or parallel.devices",
        )


def _prepare_here(spec: RunSpec, inventory: Inventory) -> RunDir:
    """Prepares a run as the one process that the user started."""
    nodes = spec.parallel.num_nodes
    if nodes > 1 and spec.emulation is None:
        raise ConfigError(
            f"parallel.num_nodes={nodes}, but the command was started on this machine only",
            remedy="start the command on every node with torchrun",
        )
    return prepare(spec, inventory)


def _run_here(
    directory: RunDir,
    spec: RunSpec,
    inventory: Inventory,
    watch: SignalWatch,
    *,
    alone: bool,
) -> None:
    """Runs in the directory, which is locked, from the one process that the user started."""
    with writing(directory.path):
        directory.open(spec)
    try:
        _resolve(spec, inventory, directory, run_job=run_job)
        if alone:
            execute(directory, spec, inventory, watch)
        else:
            _launch(directory, spec, inventory)
            if spec.emulation is not None:  # whose ranks have no access to a network
                _track(spec, directory, inventory, watch)
    except BaseException as error:
        if isinstance(error, Stopped):
            explain_stop(error, directory, spec)
        directory.remove_if_unused()
        if isinstance(error, Stopped) and error.save_error is not None:
            raise error.save_error from None
        raise
    _finish(directory, spec)


def _track(spec: RunSpec, directory: RunDir, inventory: Inventory, watch: SignalWatch) -> None:
    """Logs the outcome to trackers in place of the ranks, which have no access to a network."""
    try:
        log_outcome(Run(spec=spec, directory=directory, inventory=inventory, watch=watch))
    finally:
        end_tracking(failed=False)


def _launch(directory: RunDir, spec: RunSpec, inventory: Inventory) -> None:
    ranks = num_ranks(spec, inventory)
    # A task with one rank may measure with the threads of one of several.
    processes = task_of(spec).processes(spec, inventory)
    division = division_of(spec, kept=directory.plan)
    # Not beside the results: that their disk is full is one of the things to report.
    with scratch() as reports:

        def start() -> None:
            layout = emulated_layout()
            launch(
                [sys.executable, "-m", "sparsepipe.launch.worker", str(directory.path)],
                ranks=ranks,
                threads_per_rank=max(1, usable_cores() // processes),
                reports=reports,
                grace_s=float(spec.parallel.grace_s),
                name="rank {}".format if division is None else partial(division.name, ranks=ranks),
                address=LOOPBACK if layout is None else layout.stations[0].launcher,
            )

        with hosts_emulated(spec, inventory, directory):
            run_with_restarts(start, max_restarts=spec.parallel.max_restarts)


def _run_as_rank(spec: RunSpec, inventory: Inventory, watch: SignalWatch, ranks: int) -> RunDir:
    """Runs under an outer launcher: every rank is here, rank 0 decides."""
    # Data and plan are prepared before the group is joined: its collectives have a time limit.
    process_group.assert_world_size(ranks)
    found: RunDir | None = None
    with process_group.local_rank_first():
        if process_group.local_rank() == 0:
            found = prepare(spec, inventory)
    with ExitStack() as held:
        decided: tuple[Path, bool] | SparsePipeError | None = None
        with process_group.rank_0_first():
            if process_group.rank() == 0:
                assert found is not None
                decided = _decide(spec, inventory, found, held)
        meet(spec)
        decided = process_group.broadcast_object(decided)
        if isinstance(decided, SparsePipeError):
            raise decided
        assert decided is not None
        directory = RunDir(decided[0])
        if decided[1]:
            process_group.leave()
            return directory
        with failing_as_rank(directory, spec):
            renumber(spec, inventory, directory)
            execute(directory, spec, inventory, watch)
        if process_group.rank() == 0:
            _finish(directory, spec)
    return directory


def _decide(
    spec: RunSpec, inventory: Inventory, found: RunDir, held: ExitStack
) -> tuple[Path, bool] | SparsePipeError:
    """The run's directory, locked and with its plan, and whether it is finished; or the error."""
    try:
        held.enter_context(locked(found))
        if _finished(found, spec):
            return found.path, True
        with writing(found.path):
            found.open(spec)
        try:
            _resolve(spec, inventory, found, run_job=None)
        except BaseException:
            found.remove_if_unused()
            raise
    except SparsePipeError as error:
        return error
    return found.path, False


def _resolve(
    spec: RunSpec,
    inventory: Inventory,
    directory: RunDir,
    *,
    run_job: Callable[..., RunDir] | None,
) -> None:
    task_of(spec).adopt_plan(spec, inventory, directory)
    resolve_plan(spec, inventory, directory, run_job=run_job)
    refuse_few_microbatches(spec, kept=directory.plan)  # some searches look at neither
    ranks = num_ranks(spec, inventory)
    refuse_empty_microbatches(spec, ranks=ranks, kept=directory.plan)


def _finished(directory: RunDir, spec: RunSpec, *, anew_since_s: float | None = None) -> bool:
    if not directory.done.exists():
        return False
    if spec.force:
        if (
            anew_since_s is None
            or read_mapping(directory.done, time=reading.amount)["time"] < anew_since_s
        ):
            return False
        log.info("started anew and finished by another job of this sweep, nothing to do")
        return True
    log.info("finished before, nothing to do; force=true starts anew")
    task_of(spec).log_finished(directory)
    if _tested_last_weights(directory, spec):
        log.warning(
            "but the test's figures in %s are of the last weights, as in earlier versions, and "
            "training tests the best ones now: task=evaluate checkpoint=%s does so without "
            "training again, force=true trains again, and task.test_weights=last names a run that "
            "tests the last ones",
            directory.result,
            directory.path,
        )
    return True


def _tested_last_weights(directory: RunDir, spec: RunSpec) -> bool:
    """Whether a finished run has tested other weights than this version would."""
    if spec.task.get("test_weights", "best") != "best" or not directory.best.exists():
        return False
    result = read_mapping(directory.result)
    return "tested_checkpoint" not in result and any(key.startswith("test/") for key in result)


def _finish(directory: RunDir, spec: RunSpec) -> None:
    """Marks the run as finished, and then removes checkpoints that it is not to keep."""
    result = read_mapping(directory.result, kind=reading.name)
    directory.finish({"run_id": directory.run_id, "time": time.time(), "kind": result["kind"]})
    if directory.checkpoints.is_dir():
        log.info("%s", keep_checkpoints(directory, spec.trainer.checkpoints))


@contextmanager
def hosts_emulated(spec: RunSpec, inventory: Inventory, directory: RunDir) -> Iterator[None]:
    """Makes emulated hosts for ranks that are started within the block.

    Makes none if nothing is emulated, or if all ranks are on one host. If this process is not
    permitted to make hosts, all ranks stay on this machine, with a warning, unless
    ``hardware.network=namespaces``. Leftovers of killed emulations are removed first.

    Raises:
        HardwareError: they cannot be made.
    """
    emulation = spec.emulation
    if emulation is not None:
        clear()
    with ExitStack() as stack:
        if emulation is not None and emulation.network != "loopback":
            places = places_of_ranks(
                spec, inventory, ranks=num_ranks(spec, inventory), kept=directory.plan
            )
            names = [place.host for place in places]
            used = tuple(host for host in inventory.hosts if host.name in names)
            if len(used) > 1:
                try:
                    layout = stack.enter_context(
                        emulated_hosts(
                            replace(inventory, hosts=used), time_scale=emulation.time_scale
                        )
                    )
                    stack.enter_context(announce_hosts(layout, names))
                except NotPermitted as error:
                    if emulation.network == "namespaces":
                        raise
                    log.warning(
                        "the network between hosts is not emulated, its links are as fast as "
                        "this machine's loopback: %s; %s",
                        error.message,
                        error.remedy,
                    )
        yield
