"""Starts ranks by torch's elastic agent, and ends with all of them gone."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from sparsepipe.errors import SparsePipeError, TransportError
from sparsepipe.runtime.collectives.meeting_point import LOOPBACK
from sparsepipe.runtime.failures.rank_reports import (
    REPORT_VARIABLE,
    Stopped,
    first_cause,
    read_reports,
    save_error_of,
)
from sparsepipe.runtime.failures.unresponsive_ranks import killing_unresponsive_ranks
from sparsepipe.utils.parent import end_with_parent

log = logging.getLogger(__name__)
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
_LOOK_S = 0.25
_REPORT_S = 1.0
"""Time for a rank to report a connection that broke when the first rank was killed."""
_LAUNCHER_VARIABLE = "SPARSEPIPE_LAUNCHER"
"""Environment variable: the launching process, whose children ranks are."""


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

    A signal to this process, unless it ignores it, is passed to every rank once; they have
    ``grace_s`` to end. A second one ends this process at once, and the ranks with it (see
    :func:`follow_parent`). When a rank fails, the others are ended; soon, where they have called
    :func:`~sparsepipe.runtime.failures.unresponsive_ranks.announce_process`.

    Args:
        command: program and arguments; each rank gets RANK, LOCAL_RANK, WORLD_SIZE,
            MASTER_ADDR, MASTER_PORT in its environment.
        ranks: number of processes.
        threads_per_rank: OMP_NUM_THREADS of each, unless that is set already.
        reports: directory for the failure reports of the ranks.
        grace_s: time for an orderly end.
        name: how messages call a rank.
        address: of this host, at which alone ranks meet.

    Raises:
        Stopped: a signal ended the ranks.
        SparsePipeError: a rank failed; what it raised, or a message naming the rank.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    _silence_agent()
    reports.mkdir(parents=True, exist_ok=True)
    for stale in reports.glob("rank*.json"):
        stale.unlink()
    config = _agent_config(ranks, reports, grace_s, address)
    started_s = time.monotonic()
    environment = _environment(threads_per_rank, reports)
    with environment, _restored_signals(), killing_unresponsive_ranks(reports):
        try:
            elastic_launch(config, command[0])(*command[1:])
        except SignalException as stop:
            found = read_reports(reports)
            # Sooner than that no rank can have been killed for taking too long.
            late = time.monotonic() - started_s >= grace_s
            raise Stopped(
                stop.sigval,
                unresponsive=[rank for rank in range(ranks) if late and rank not in found],
                save_error=save_error_of(found),
            ) from None
        except ChildFailedError as failure:
            raise first_cause(failure, reports, name=name) from None


def run_with_restarts(start: Callable[[], None], *, max_restarts: int) -> None:
    """Calls ``start`` until it returns, at most ``max_restarts`` times more than once.

    Every attempt needs ranks, a store and reports of its own, and goes on from the last checkpoint.

    Raises:
        SparsePipeError: of the last attempt, or one that would come again.
    """
    for restart in range(max_restarts + 1):
        try:
            start()
            return
        except SparsePipeError as error:
            if restart == max_restarts or not is_transient(error):
                raise
            log.warning("%s", error.message)
            log.warning("beginning again, restart %d of %d", restart + 1, max_restarts)


def is_transient(error: SparsePipeError) -> bool:
    """Whether another attempt can succeed: a rank died, hung, was cut off, or raised.

    Settings, data, checkpoints and hardware stay as they are, and so does a full disk: every
    attempt would train up to the next checkpoint, and not be able to write that either.
    """
    return type(error) in (SparsePipeError, TransportError)


def announce_launcher() -> None:
    """Lets processes that are started from here know that this one starts ranks."""
    os.environ[_LAUNCHER_VARIABLE] = str(os.getpid())


def launcher_process() -> int | None:
    """The number of the process that has started this rank, where it is one of ours."""
    text = os.environ.get(_LAUNCHER_VARIABLE)
    return None if text is None else int(text)


def follow_parent(interval_s: float = 0.5, *, parent: int | None = None) -> None:
    """Ends this process when its parent is gone, however that ended: at once where the kernel sees
    to it, else within ``interval_s`` or so.

    ``parent`` is its process number, since it may be gone already; by default that of this rank's
    launcher.
    """
    if parent is None:
        parent = launcher_process() or os.getppid()
    end_with_parent(parent)
    _end_after(parent, interval_s=interval_s)  # there is no launcher left to report to


def end_with_launcher() -> threading.Event | None:
    """Ends this rank of somebody's script with whatever has started it.

    An elastic agent outlives its ranks in good runs, so the kernel may kill a rank with it. The
    first rank of Lightning's launcher may end before others do that have more to do: they end with
    it only until the returned event is set.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(parent)
        return None
    if launcher_process() != parent:
        return None  # somebody has started the ranks one by one
    return _end_after(parent, interval_s=_LOOK_S, grace_s=_REPORT_S)


def _end_after(parent: int, *, interval_s: float, grace_s: float = 0.0) -> threading.Event:
    """Ends this process when its parent has ended, unless the returned event is set by then."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(interval_s):
            if os.getppid() != parent:
                if not over.wait(grace_s):
                    os._exit(1)
                return

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()
    return over


@contextmanager
def environment_variables(
    values: Mapping[str, str], *, restored: tuple[str, ...] = ()
) -> Iterator[None]:
    """Sets environment variables while the block runs; restores them and ``restored`` after."""
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


def _agent_config(ranks: int, reports: Path, grace_s: float, address: str) -> Any:
    """The elastic agent's settings: one host, a free port of ``address``, no restarts."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from sparsepipe.runtime import rendezvous

    rendezvous.register()

    # Signals that this process ignores, as under nohup, stay ignored.
    handled = [s for s in _SIGNALS if signal.getsignal(getattr(signal, s)) is not signal.SIG_IGN]
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"sparsepipe-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=f"{address}:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=",".join(handled),
        shutdown_timeout=int(grace_s),
        logs_specs=DefaultLogsSpecs(log_dir=str(reports)),  # else it leaves them in /tmp
    )


def _silence_agent() -> None:
    """The agent reports in its own terms (process numbers, local ranks); we report in ours."""
    # torch gives each of these loggers a level of its own, so their parent's does not count.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _environment(threads_per_rank: int, reports: Path) -> AbstractContextManager[None]:
    """Environment variables that ranks inherit, set for the time of the launch only."""
    values = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank)),
        REPORT_VARIABLE: str(reports),
        _LAUNCHER_VARIABLE: str(os.getpid()),  # the agent runs here and starts ranks by fork
    }
    return environment_variables(values, restored=("TORCHELASTIC_SIGNALS_TO_HANDLE",))


@contextmanager
def _restored_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
