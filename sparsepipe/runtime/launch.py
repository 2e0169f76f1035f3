"""Starts ranks on this host and waits until all of them have ended."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from sparsepipe.errors import SparsePipeError, TransportError
from sparsepipe.runtime.collectives.meeting_point import LOOPBACK, keep_store
from sparsepipe.runtime.failures.rank_reports import (
    REPORT_VARIABLE,
    Stopped,
    first_cause,
    read_reports,
    rebuilt,
)

log = logging.getLogger(__name__)

LAUNCHER_VARIABLE = "SPARSEPIPE_LAUNCHER"
"""Environment variable: ID of the process that started this rank."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S = 0.05
_STORE_LIMIT_S = 60.0
_PATIENCE_S = 5.0
"""Seconds for the other ranks to notice that one has failed and to report it. There is nothing else
to wait for: a checkpoint would need all ranks."""


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    threads_per_rank: int,
    reports: Path,
    grace_s: float = 120.0,
    name: Callable[[int], str] = "rank {}".format,
    address: str = LOOPBACK,
) -> None:
    """Runs ``command`` in ``ranks`` processes on this host and waits for them.

    The first SIGTERM, SIGINT or SIGHUP, unless this process ignores it, is passed to every rank. A
    second one ends this process at once, and the ranks with it (see
    :func:`~sparsepipe.utils.process.end_with_parent`). When a rank fails, the others are ended.

    Args:
        command: program and arguments; each rank gets the environment variables that ``torchrun``
            sets, such as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
        ranks: number of processes.
        threads_per_rank: OMP_NUM_THREADS of each rank, unless that is already set.
        reports: directory for the failure reports of the ranks.
        grace_s: seconds that ranks have to end after a signal.
        name: returns the name of a rank for messages.
        address: address of this host at which ranks meet.

    Raises:
        Stopped: a signal ended the ranks.
        SparsePipeError: a rank failed: the error that it raised, or one that names the rank.
    """
    reports.mkdir(parents=True, exist_ok=True)
    for stale in reports.glob("rank*.json"):
        stale.unlink()
    store = keep_store(address, 0, timeout=timedelta(seconds=_STORE_LIMIT_S))
    variables = {
        "OMP_NUM_THREADS": str(threads_per_rank),
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": f"sparsepipe-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank is to keep a store
        REPORT_VARIABLE: str(reports),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    with _noted_signals() as received:
        exit_codes = _run_ranks(command, ranks, variables, received, reports, grace_s=grace_s)
    unresponsive = [rank for rank in range(ranks) if rank not in exit_codes]
    if received:
        # What kept a rank from saving, such as a full disk.
        own = [r for r in read_reports(reports).values() if r["known"] and r["missed"] is None]
        save_error = rebuilt(own[0], "") if own else None
        raise Stopped(received[0], unresponsive=unresponsive, save_error=save_error)
    if unresponsive or any(exit_codes.values()):
        raise first_cause(exit_codes, reports, unresponsive=unresponsive, name=name)


def _run_ranks(
    command: Sequence[str],
    ranks: int,
    variables: Mapping[str, str],
    received: Sequence[int],
    reports: Path,
    *,
    grace_s: float,
) -> dict[int, int]:
    """Returns exit codes by rank, in the order of their ends, without ranks that must be killed."""
    found: dict[int, int] = {}
    processes: list[subprocess.Popen[bytes]] = []
    deadline_s, asked, failed = math.inf, False, False

    def send(process: subprocess.Popen[bytes], signum: int) -> None:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    try:
        for rank in range(ranks):
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # In sessions of their own, so that a terminal's Ctrl-C reaches this process alone.
            processes.append(subprocess.Popen(command, env=own, start_new_session=True))
        while len(found) < ranks and time.monotonic() < deadline_s:
            for rank, process in enumerate(processes):
                if rank not in found and (code := process.poll()) is not None:
                    found[rank] = code
            if not asked and (received or any(found.values())):
                asked, deadline_s = True, time.monotonic() + grace_s
                for process in processes:
                    send(process, received[0] if received else signal.SIGTERM)
            if not failed and any(found.values()):
                # A rank that a signal stopped has not failed: the others may take time to save.
                reported = read_reports(reports)
                stopped = [r for r, report in reported.items() if report["stopped"] is not None]
                failed = any(code and rank not in stopped for rank, code in found.items())
                if failed:
                    deadline_s = min(deadline_s, time.monotonic() + _PATIENCE_S)
            time.sleep(_LOOK_S)
    finally:
        for process in processes:
            send(process, signal.SIGKILL)
            process.wait()
    return found


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Context that yields a list, to which it adds the first signal; a second ends this process."""
    received: list[int] = []

    def note(signum: int, frame: object) -> None:
        if received:
            os._exit(128 + signum)
        received.append(signum)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    try:
        for signum, handler in before.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, note)
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_with_restarts(start: Callable[[], None], *, max_restarts: int) -> None:
    """Calls ``start`` until it succeeds, with at most ``max_restarts`` restarts.

    ``start`` must start new ranks and a new store, and resume from the last checkpoint. Restarts
    follow if a rank died, hung, was cut off or raised another package's error, but not for errors
    in settings, data or hardware or for a full disk, which would recur.
    """
    for restart in range(max_restarts + 1):
        try:
            start()
            return
        except SparsePipeError as error:
            if restart == max_restarts or type(error) not in (SparsePipeError, TransportError):
                raise
            log.warning("%s", error.message)
            log.warning("beginning again, restart %d of %d", restart + 1, max_restarts)


@contextmanager
def environment_variables(
    values: Mapping[str, str], *, restored: tuple[str, ...] = ()
) -> Iterator[None]:
    """Sets environment variables for the block; then restores them and those in ``restored``."""
    before = {name: os.environ.get(name) for name in (*values, *restored)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
