"""Reports that ranks leave for their launcher when they fail or are stopped.

A rank that dies makes its peers fail in their collectives, so the launcher sees several failures
and raises the first cause.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sparsepipe.errors import SparsePipeError, TransportError

REPORT_VARIABLE = "SPARSEPIPE_RANK_REPORTS"
"""Environment variable: directory for the reports of failing ranks."""

_RESUME = "run the command again, without force=true, to go on from the last checkpoint"
_BACKEND = re.compile(r"gloo/|c10d|nccl", re.IGNORECASE)
_Report = dict[str, Any]


class Stopped(BaseException):
    """Raised when a signal stopped the ranks in good order, which is not an error.

    Args:
        unresponsive: ranks that did not end in time.
        save_error: error that kept a rank from saving a checkpoint, such as a full disk.

    Attributes:
        exit_code: exit code that a process ended by the signal should have: 130 for Ctrl-C.
    """

    def __init__(
        self,
        signum: int,
        *,
        unresponsive: Sequence[int] = (),
        save_error: SparsePipeError | None = None,
    ) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.exit_code = 128 + signum
        self.unresponsive = tuple(unresponsive)
        self.save_error = save_error
        self.message = f"stopped by {self}; run the same command again to go on"


def is_backend_error(kind: str, message: str) -> bool:
    """Whether an exception, given its class name and text, comes from the collectives' backend."""
    return kind.startswith("Dist") or (kind == "RuntimeError" and bool(_BACKEND.search(message)))


def exit_immediately(error: BaseException) -> NoReturn:
    """Reports an error and ends this process without any cleanup, with the error's own exit code.

    Cleanup would wait for ranks that are gone: threads that gloo blocks cannot be ended. The
    connections to the peers break at once, so the peers notice in their next call.
    """
    code = getattr(error, "exit_code", 1)
    trace = "".join(traceback.format_exception(error))
    try:
        reported = write_failure_report(error, exit_code=code, trace=trace)
    except OSError:  # a full disk, which may be the error itself
        reported = False
    # The streams may be files on that disk, or pipes whose reader is gone.
    with suppress(OSError, ValueError):
        if not reported:
            sys.stderr.write(trace)
        logging.shutdown()
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code or 1)


def write_failure_report(error: BaseException, *, exit_code: int, trace: str) -> bool:
    """Writes a report of why this rank ends; returns False if no launcher waits for one.

    A stop that follows from a TransportError is reported together with that error.
    """
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        return False
    stopped = error.signum if isinstance(error, Stopped) else None
    if stopped is not None and isinstance(error.__cause__, TransportError):
        error = error.__cause__
    rank = os.environ.get("RANK", "0")
    place = str(next(iter(getattr(error, "__notes__", ())), ""))  # the innermost note
    report = {
        "time": time.time(),
        "stopped": stopped,
        "module": type(error).__module__,
        "kind": type(error).__name__,
        "message": error.message if isinstance(error, SparsePipeError) else str(error),
        "remedy": error.remedy if isinstance(error, SparsePipeError) else None,
        "known": isinstance(error, SparsePipeError),
        "missed": list(error.ranks) if isinstance(error, TransportError) else None,
        "trace": trace,
        "place": place.removeprefix(f"rank {rank}, "),
        "exit_code": exit_code,
    }
    partial = Path(directory) / f".rank{rank}.tmp"
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.replace(Path(directory) / f"rank{rank}.json")
    return True


def read_reports(directory: Path) -> dict[int, _Report]:
    """Reports that ranks have left in ``directory``, by rank, the earliest first."""
    found = {
        int(path.stem.removeprefix("rank")): json.loads(path.read_text(encoding="utf-8"))
        for path in directory.glob("rank*.json")
    }
    return dict(sorted(found.items(), key=lambda item: float(item[1]["time"])))


def first_cause(
    exit_codes: Mapping[int, int],
    directory: Path,
    *,
    unresponsive: Sequence[int] = (),
    name: Callable[[int], str] = "rank {}".format,
) -> BaseException:
    """The cause of a failed launch as an exception for the user.

    The first that applies: the earliest error that no other rank caused, those of this package
    first; a rank that died without a report; a stop, if it is the earliest report; an error about a
    missing rank; a rank that did not respond.

    Args:
        exit_codes: exit codes of ranks that ended by themselves, in the order of their ends.
        directory: directory of the reports.
        unresponsive: ranks that had to be killed.
        name: returns the name of a rank for messages.
    """
    reports = read_reports(directory)
    kind: type[SparsePipeError]
    for rank, report in sorted(reports.items(), key=lambda item: not item[1]["known"]):
        consequence = report["missed"] is not None or report["stopped"] is not None
        if not consequence and not is_backend_error(report["kind"], report["message"]):
            return rebuilt(report, name(rank))
    silent = [rank for rank, code in exit_codes.items() if code and rank not in reports]
    died = [rank for rank in silent if exit_codes[rank] != -signal.SIGTERM]
    if not died and not reports:  # then SIGTERM came from outside, not from the launcher
        died = silent
    missed = {rank: each for rank, each in reports.items() if each["missed"] is not None}
    witness = ""
    for rank, report in reports.items():
        if not witness and rank in missed:
            witness = f"; {name(rank)} reported: {report['message']}"
        elif not witness and report["stopped"] is None and report["place"]:
            witness = f"; noticed by {name(rank)} ({report['place']})"
    if died and exit_codes[died[0]] == -signal.SIGINT:  # before it handled signals
        return Stopped(signal.SIGINT)
    if died:
        kind = TransportError if missed else SparsePipeError
        code = exit_codes[died[0]]
        how = f"ended with exit code {code}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else how
    elif reports and (signum := next(iter(reports.values()))["stopped"]) is not None:
        return Stopped(signum)  # the others miss that rank because it ended
    elif missed:
        # A missed rank that reports itself was waiting for another one.
        silent_ones = [each for each in missed.values() if not reports.keys() & each["missed"]]
        return rebuilt((silent_ones or list(missed.values()))[0], "")
    elif unresponsive:
        kind, died = SparsePipeError, list(unresponsive)
        how = "did not answer and was still running when the others had given up"
    else:
        rank, report = next(iter(reports.items()))
        return rebuilt(report, name(rank))
    return kind(
        f"{name(died[0])} {how}{witness}; the other ranks were ended",
        remedy="check whether the machine ran out of memory or the process was stopped; "
        f"then {_RESUME}",
    )


def rebuilt(report: _Report, rank: str) -> SparsePipeError:
    """The error in a report; another package's as a SparsePipeError with its traceback and rank."""
    kind = getattr(sys.modules.get(report["module"]), report["kind"], SparsePipeError)
    if not (isinstance(kind, type) and issubclass(kind, SparsePipeError)):
        kind = SparsePipeError
    if report["known"]:
        return kind(report["message"], remedy=report["remedy"])
    place = f" ({report['place']})" if report["place"] else ""
    raised = f"{rank} raised {report['kind']}: {report['message']}{place}"
    return SparsePipeError(
        f"{report['trace'].rstrip()}\n{raised}", remedy=f"fix the cause, then {_RESUME}"
    )
