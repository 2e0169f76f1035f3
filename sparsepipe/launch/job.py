"""One job from its configuration to its finished run directory.

The process that composed the configuration prepares data and directory; ranks then run
the task, in this process where there is one rank only, else started by the elastic agent.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sparsepipe.cluster import Inventory
from sparsepipe.config.division import division_of
from sparsepipe.config.emulation import emulation_of
from sparsepipe.config.outputs import writing
from sparsepipe.config.signature import locate
from sparsepipe.errors import ConfigError, SparsePipeError
from sparsepipe.launch.checked_config import understood
from sparsepipe.launch.emulated_hosts import hosts_emulated
from sparsepipe.launch.execute import execute
from sparsepipe.launch.joining import meet
from sparsepipe.launch.outcome import log_outcome
from sparsepipe.launch.prepare import prepare
from sparsepipe.launch.renumber import renumber
from sparsepipe.launch.samples_to_cut import (
    refuse_empty_microbatches,
    refuse_few_microbatches,
)
from sparsepipe.launch.stopping import failing_as_rank, tell_stop
from sparsepipe.planning.plan_resolution import resolve_plan
from sparsepipe.results.files import read_json
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.runs.scratch import scratch
from sparsepipe.runs.signals import SignalWatch
from sparsepipe.runtime.collectives import process_group
from sparsepipe.runtime.collectives.process_group import first_to_report
from sparsepipe.runtime.failures.rank_reports import Stopped
from sparsepipe.runtime.launch import attempt, launch
from sparsepipe.tasks.evaluate import keep_plan_of_training
from sparsepipe.tasks.run import Run, num_ranks
from sparsepipe.tracking.loggers import end_tracking
from sparsepipe.utils.host import git_commit, usable_cores

__all__ = ["Stopped", "first_to_report", "run_job"]

log = logging.getLogger(__name__)


def run_job(
    config: Mapping[str, Any],
    *,
    fresh_processes: bool = False,
    wait_s: float = 0.0,
    anew_since_s: float | None = None,
    found: Callable[[RunDir], object] = lambda directory: None,
) -> RunDir:
    """Runs a job, or skips it when it is finished, or goes on with it.

    Args:
        config: resolved and checked.
        fresh_processes: start a process even for a single rank, as sweeps must.
        wait_s: how long to wait for another process that does the same job.
        anew_since_s: a run that has finished since then (seconds since 1970) counts as one that
            ``force`` has started anew already.
        found: is told the run's directory as soon as that is known.

    Returns:
        The run's directory, finished.

    Raises:
        SparsePipeError: something a user can mend.
        Stopped: a signal ended the run.
    """
    git_commit()  # of what is read by now: the checkout may be another one at the run's end
    config, inventory, ranks = understood(config)
    with SignalWatch() as watch:
        if process_group.started_externally():
            return _run_as_rank(config, inventory, watch, ranks)
        # What may have to begin again needs processes that can be ended.
        processes = fresh_processes or config["parallel"].get("max_restarts", 0) > 0
        alone = ranks == 1 and not processes and emulation_of(config) is None
        directory = _prepare_here(config, inventory)
        found(directory)
        with locked(directory, wait_s=wait_s):
            if not _finished(directory, config, anew_since_s=anew_since_s):
                _run_here(directory, config, inventory, watch, alone=alone)
        return directory


def _prepare_here(config: Mapping[str, Any], inventory: Inventory) -> RunDir:
    """Prepares a run as the one process that the user started."""
    nodes = config["parallel"]["num_nodes"]
    if nodes > 1 and emulation_of(config) is None:
        raise ConfigError(
            f"parallel.num_nodes={nodes}, but only this machine was asked",
            remedy="start the command on every node with torchrun",
        )
    return prepare(config, inventory)


def _run_here(
    directory: RunDir,
    config: Mapping[str, Any],
    inventory: Inventory,
    watch: SignalWatch,
    *,
    alone: bool,
) -> None:
    """Runs in the directory, which is locked, from the one process that the user started."""
    with writing(directory.path):
        directory.open(config)
    try:
        _resolve(config, inventory, directory, run_job=run_job)
        if alone:
            execute(directory, config, inventory, watch)
        else:
            _launch(directory, config, inventory)
            if emulation_of(config) is not None:  # whose ranks have no way to the world
                _track(config, directory, inventory, watch)
    except BaseException as error:
        if isinstance(error, Stopped):
            tell_stop(error, directory, config)
        directory.remove_if_unused()
        if isinstance(error, Stopped) and error.broke is not None:
            raise error.broke from None
        raise
    _finish(directory)


def _track(
    config: Mapping[str, Any], directory: RunDir, inventory: Inventory, watch: SignalWatch
) -> None:
    """Tells trackers of a run what its ranks could not."""
    try:
        log_outcome(Run(config=config, directory=directory, inventory=inventory, watch=watch))
    finally:
        end_tracking(failed=False)


def _launch(directory: RunDir, config: Mapping[str, Any], inventory: Inventory) -> None:
    ranks = num_ranks(config, inventory)
    # What is measured alone may have to be so as one process of several.
    count = getattr(locate(config["task"]["_target_"]), "processes", None)
    processes = ranks if count is None else count(config, inventory)
    division = division_of(config, kept=directory.plan)
    # Not beside the results: that their disk is full is one of the things to report.
    with scratch() as reports:

        def start() -> None:
            launch(
                [sys.executable, "-m", "sparsepipe.launch.worker", str(directory.path)],
                ranks=ranks,
                threads_per_rank=max(1, usable_cores() // processes),
                reports=reports,
                grace_s=float(config["parallel"]["grace_s"]),
                name="rank {}".format if division is None else partial(division.name, ranks=ranks),
            )

        with hosts_emulated(config, inventory, directory):
            attempt(start, max_restarts=config["parallel"].get("max_restarts", 0))


def _run_as_rank(
    config: Mapping[str, Any], inventory: Inventory, watch: SignalWatch, ranks: int
) -> RunDir:
    """Runs under an outer launcher: every rank is here, rank 0 decides.

    Data are prepared and the plan is settled before the group is joined, since its collectives
    have a time limit.
    """
    process_group.assert_world_size(ranks)
    found: RunDir | None = None
    with process_group.local_rank_first():
        if process_group.local_rank() == 0:
            found = prepare(config, inventory)
    with contextlib.ExitStack() as held:
        decided: tuple[Path, bool] | SparsePipeError | None = None
        with process_group.rank_0_first():
            if process_group.rank() == 0:
                assert found is not None
                decided = _decide(config, inventory, found, held)
        meet(config)
        decided = process_group.broadcast_object(decided)
        if isinstance(decided, SparsePipeError):
            raise decided
        assert decided is not None
        directory = RunDir(decided[0])
        if decided[1]:
            process_group.leave()
            return directory
        with failing_as_rank(directory, config):
            renumber(config, inventory, directory)
            execute(directory, config, inventory, watch)
        if process_group.rank() == 0:
            _finish(directory)
    return directory


def _decide(
    config: Mapping[str, Any], inventory: Inventory, found: RunDir, held: contextlib.ExitStack
) -> tuple[Path, bool] | SparsePipeError:
    """The run's directory, locked and settled, and whether it is finished; or what is wrong."""
    try:
        held.enter_context(locked(found))
        if _finished(found, config):
            return found.path, True
        with writing(found.path):
            found.open(config)
        try:
            _resolve(config, inventory, found, run_job=None)
        except BaseException:
            found.remove_if_unused()
            raise
    except SparsePipeError as error:
        return error
    return found.path, False


def _resolve(
    config: Mapping[str, Any],
    inventory: Inventory,
    directory: RunDir,
    *,
    run_job: Callable[..., RunDir] | None,
) -> None:
    keep_plan_of_training(config, inventory, directory)
    resolve_plan(config, inventory, directory, run_job=run_job)
    refuse_few_microbatches(config, kept=directory.plan)  # some searches look at neither
    ranks = num_ranks(config, inventory)
    refuse_empty_microbatches(config, ranks=ranks, kept=directory.plan)


def _finished(
    directory: RunDir, config: Mapping[str, Any], *, anew_since_s: float | None = None
) -> bool:
    if not directory.done.exists():
        return False
    if config["force"]:
        if anew_since_s is None or read_json(directory.done)["time"] < anew_since_s:
            return False
        log.info("started anew and finished by another job of this sweep, nothing to do")
        return True
    log.info("finished before, nothing to do; force=true starts anew")
    return True


def _finish(directory: RunDir) -> None:
    result = read_json(directory.result)
    directory.finish({"run_id": directory.run_id, "time": time.time(), "kind": result["kind"]})
