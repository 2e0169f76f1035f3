"""Kills ranks that do not end although another one has failed: they are stopped, or hang.

The elastic agent sends them SIGTERM and waits half a minute for those that do not respond. There is
nothing to wait for: a checkpoint would need all ranks.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from sparsepipe.runtime.failures.rank_reports import (
    REPORT_VARIABLE,
    read_reports,
    unresponsive_mark,
)

_PATIENCE_S = 5.0
"""Time for a rank to notice a peer's failure and to report it."""


def announce_process() -> None:
    """Writes this rank's process number for its launcher, if there is one.

    Where that is not possible the agent ends the rank, only later.
    """
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        return
    with suppress(OSError):
        rank = os.environ.get("RANK", "0")
        partial = Path(directory) / f".pid{rank}.tmp"
        partial.write_text(str(os.getpid()), encoding="ascii")
        announced = Path(directory) / f"rank{rank}.pid"
        partial.replace(announced)
        atexit.register(announced.unlink, missing_ok=True)  # not if a signal or os._exit ends it


@contextmanager
def killing_unresponsive_ranks(reports: Path) -> Iterator[None]:
    """Kills ranks that still run some seconds after one has failed, while the block runs.

    A rank that a signal stopped has not failed: the others may take their time to save.
    """
    for stale in (*reports.glob("rank*.pid"), *reports.glob(unresponsive_mark(reports, "*").name)):
        stale.unlink()
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(reports, _PATIENCE_S, over), name="unresponsive-ranks", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(reports: Path, patience_s: float, over: threading.Event) -> None:
    failed_s: float | None = None
    while not over.wait(0.1):
        processes = _announced(reports)
        if failed_s is None and _one_failed(reports, processes):
            failed_s = time.monotonic()
        if failed_s is not None and time.monotonic() > failed_s + patience_s:
            running = {rank: process for rank, process in processes.items() if _runs(process)}
            for rank in running:
                with suppress(OSError):  # a full disk
                    unresponsive_mark(reports, rank).touch()
            _kill(running.values())
            return


def _kill(processes: Iterable[int]) -> None:
    """Kills children that ran a moment ago; the agent may have reaped one since."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _announced(reports: Path) -> dict[int, int]:
    """Process numbers by rank, without those that have exited in good order."""
    found = {}
    for path in reports.glob("rank*.pid"):
        with suppress(FileNotFoundError):
            found[int(path.stem.removeprefix("rank"))] = int(path.read_text(encoding="ascii"))
    return found


def _one_failed(reports: Path, processes: Mapping[int, int]) -> bool:
    """Whether a rank has reported a failure, or is gone without a report."""
    found = read_reports(reports)
    return any(report["stopped"] is None for report in found.values()) or any(
        not _runs(process) and rank not in found and (reports / f"rank{rank}.pid").exists()
        for rank, process in processes.items()
    )


def _runs(process: int) -> bool:
    """Whether a child of this process has not ended; others may have reaped it."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
