"""Ranks that do not end although another has failed: stopped, or stuck for good.

The elastic agent asks them to end, and has half a minute's patience with those that cannot
hear. There is nothing left to wait for: what they could save needs all ranks.
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
"""How long a rank may take to notice a peer's failure and to tell what it knows of it."""


def announce() -> None:
    """Tells the launching process, if one waits, which process this rank is.

    Where that is not possible the agent ends the rank, only later.
    """
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        return
    with suppress(OSError):
        rank = os.environ.get("RANK", "0")
        partial = Path(directory) / f".pid{rank}.tmp"
        partial.write_text(str(os.getpid()), encoding="ascii")
        told = Path(directory) / f"rank{rank}.pid"
        partial.replace(told)
        atexit.register(told.unlink, missing_ok=True)  # not where a signal or os._exit ends it


@contextmanager
def killing_unresponsive_ranks(reports: Path) -> Iterator[None]:
    """Kills ranks that still run some seconds after one has failed, while the block runs.

    Ranks that a signal stopped have not failed: others may take their time to write.

    Args:
        reports: where ranks announce themselves and say why they end.
    """
    for stale in (*reports.glob("rank*.pid"), *reports.glob(unresponsive_mark(reports, "*").name)):
        stale.unlink()
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(reports, _PATIENCE_S, over), name="lingerers", daemon=True
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
            lingering = {rank: process for rank, process in processes.items() if _runs(process)}
            for rank in lingering:
                with suppress(OSError):  # a full disk
                    unresponsive_mark(reports, rank).touch()
            _kill(lingering.values())
            return


def _kill(processes: Iterable[int]) -> None:
    """Kills children that have just been seen to run.

    The agent's thread may wait for one in between. Its id would have to be given to another
    process within that moment to be another's.
    """
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _announced(reports: Path) -> dict[int, int]:
    """Processes by rank, of those that have not exited in good order."""
    found = {}
    for path in reports.glob("rank*.pid"):
        with suppress(FileNotFoundError):
            found[int(path.stem.removeprefix("rank"))] = int(path.read_text(encoding="ascii"))
    return found


def _one_failed(reports: Path, processes: Mapping[int, int]) -> bool:
    """Whether a rank says so, or is gone without a word."""
    said = read_reports(reports)
    told = any(report["stopped"] is None for report in said.values())
    return told or any(
        not _runs(process) and rank not in said and (reports / f"rank{rank}.pid").exists()
        for rank, process in processes.items()
    )


def _runs(process: int) -> bool:
    """Whether a child of this process has not ended; others may have waited for it."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
