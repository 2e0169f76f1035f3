"""Starts ranks by torch's elastic agent, and ends with all of them gone."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsepipe.errors import SparsePipeError

REPORT_VARIABLE = "SPARSEPIPE_RANK_REPORTS"
"""Environment variable: directory where a failing rank says why."""

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
_GO_ON = "run the command again, without force=true, to go on from the last checkpoint"
_WAITS = re.compile("timed? ?out|connection|gloo|nccl|peer|socket", re.IGNORECASE)
"""Words of a collective that waited for a rank in vain."""

_Reports = list[tuple[int, dict[str, Any]]]
"""Ranks and their reports, the earliest first."""


class Stopped(BaseException):
    """The ranks were stopped by a signal, in good order.

    Derived from ``BaseException`` as ``KeyboardInterrupt`` is: nobody should take a stop
    for a failure.

    Args:
        signum: the signal.
        unheard: ranks that did not say that they stopped, as far as known.
    """

    def __init__(self, signum: int, *, unheard: Sequence[int] = ()) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.unheard = tuple(unheard)
        self.message = f"stopped by {self}; run the same command again to go on"

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process ended by the signal: 130 for Ctrl-C."""
        return 128 + self.signum


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    threads_per_rank: int,
    reports: Path,
    grace_s: float = 120.0,
) -> None:
    """Runs ``command`` in ``ranks`` processes on this host and waits for them.

    A signal to this process is passed to every rank once; they have ``grace_s`` to end.
    A second one ends this process at once, and the ranks with it (see :func:`follow_parent`).
    When a rank fails, the others are ended.

    Args:
        command: program and arguments; each rank gets RANK, LOCAL_RANK, WORLD_SIZE,
            MASTER_ADDR, MASTER_PORT in its environment.
        ranks: number of processes.
        threads_per_rank: OMP_NUM_THREADS of each, unless that is set already.
        reports: directory for the failure reports of the ranks.
        grace_s: time for an orderly end.

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
    config = _agent_config(ranks, reports, grace_s)
    started_s = time.monotonic()
    with _environment(threads_per_rank, reports), _restored_signals():
        try:
            elastic_launch(config, command[0])(*command[1:])
        except SignalException as stop:
            heard = _reports(reports)
            # Sooner than that nobody can have been killed for taking too long.
            late = time.monotonic() - started_s >= grace_s
            unheard = [rank for rank in range(ranks) if late and rank not in heard]
            raise Stopped(stop.sigval, unheard=unheard) from None
        except ChildFailedError as failure:
            raise _explain(failure, reports) from None


def _agent_config(ranks: int, reports: Path, grace_s: float) -> Any:
    """The elastic agent's settings: one host, loopback, a free port, no restarts."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"sparsepipe-{os.getpid()}-{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle=",".join(_SIGNALS),
        shutdown_timeout=int(grace_s),
        logs_specs=DefaultLogsSpecs(log_dir=str(reports)),  # else it leaves them in /tmp
    )


def report_failure(error: BaseException, *, exit_code: int, trace: str) -> None:
    """Leaves word for the launching process why this rank ends."""
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        return
    rank = os.environ.get("RANK", "0")
    known = isinstance(error, SparsePipeError)
    report = {
        "time": time.time(),
        "stopped": error.signum if isinstance(error, Stopped) else None,
        "module": type(error).__module__,
        "kind": type(error).__name__,
        "message": error.message if isinstance(error, SparsePipeError) else str(error),
        "remedy": error.remedy if isinstance(error, SparsePipeError) else None,
        "known": known,
        "trace": trace,
        "exit_code": exit_code,
    }
    partial = Path(directory) / f".rank{rank}.tmp"
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.replace(Path(directory) / f"rank{rank}.json")


def follow_parent(interval_s: float = 0.5) -> None:
    """Ends this process soon after its parent is gone, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(interval_s)
        os._exit(1)  # nothing to tell and nobody to tell it to

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


def _silence_agent() -> None:
    """The agent reports in its own terms (pids, local ranks); the house says it anew."""
    # torch gives each of these loggers a level of its own, so their parent's does not count.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _reports(directory: Path) -> dict[int, dict[str, Any]]:
    """What ranks left by :func:`report_failure`."""
    return {
        int(path.stem.removeprefix("rank")): json.loads(path.read_text(encoding="utf-8"))
        for path in directory.glob("rank*.json")
    }


def _explain(failure: Any, reports: Path) -> BaseException:
    """The first rank's failure as an exception for the user.

    A rank that dies makes its peers fail in their collectives or has them stopped by the
    agent, so the earliest report of the house's own errors counts, then a rank that died
    without a word, then the earliest of the rest.
    """
    found = _reports(reports)
    by_time = sorted(found.items(), key=lambda item: item[1]["time"])
    for _, report in by_time:
        if report["known"]:
            return _revive(report)
    silent = {
        rank: entry
        for rank, entry in failure.failures.items()
        if rank not in found and entry.exitcode != -signal.SIGTERM
    }
    if silent and not _blames_itself(by_time, silent):
        rank, entry = min(silent.items(), key=lambda item: item[1].timestamp)
        return SparsePipeError(
            f"rank {rank} {_death(entry, by_time)}; the other ranks were ended",
            remedy="see whether the machine runs out of memory or the process was stopped; "
            f"then {_GO_ON}",
        )
    rank, report = by_time[0]
    if report["stopped"] is not None:
        return Stopped(report["stopped"])
    return SparsePipeError(
        f"{report['trace'].rstrip()}\nrank {rank} raised {report['kind']}: {report['message']}",
        remedy=f"mend the cause, then {_GO_ON}",
    )


def _blames_itself(by_time: _Reports, silent: Mapping[int, Any]) -> bool:
    """Whether the first complaint is a cause of its own: it tells of no wait for a rank.

    Then the silent ranks were busy when the agent ended them for it.
    """
    if not by_time or not all(_killed_late(entry, by_time) for entry in silent.values()):
        return False
    report = by_time[0][1]
    return report["stopped"] is None and not _WAITS.search(f"{report['kind']} {report['message']}")


def _killed_late(entry: Any, by_time: _Reports) -> bool:
    """Whether a rank had to be killed by the agent, well after others complained."""
    return (
        bool(by_time)
        and entry.exitcode == -signal.SIGKILL
        and float(by_time[0][1]["time"]) + 1 < entry.timestamp
    )


def _revive(report: dict[str, Any]) -> SparsePipeError:
    module = sys.modules.get(report["module"])
    kind = getattr(module, report["kind"], SparsePipeError)
    if not (isinstance(kind, type) and issubclass(kind, SparsePipeError)):
        kind = SparsePipeError
    return kind(report["message"], remedy=report["remedy"])


def _death(entry: Any, by_time: _Reports) -> str:
    """How a rank ended that left no report."""
    if entry.exitcode >= 0:
        return f"ended with exit code {entry.exitcode}"
    if _killed_late(entry, by_time):
        return "did not answer within the limit (parallel.strategy.timeout_s)"
    return f"was killed by {signal.Signals(-entry.exitcode).name}"


@contextmanager
def _environment(threads_per_rank: int, reports: Path) -> Iterator[None]:
    """What ranks inherit, set for the time of the launch only."""
    values = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
        REPORT_VARIABLE: str(reports),
    }
    before = {name: os.environ.get(name) for name in (*values, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update({name: value for name, value in values.items() if value})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _loopback() -> str:
    """The loopback interface: gloo would resolve the host's name, which need not succeed."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return names[0] if names else ""


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
