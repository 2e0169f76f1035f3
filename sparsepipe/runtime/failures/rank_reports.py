"""How a rank leaves when something went wrong: told, and at once."""

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

_ORIGIN = re.compile(r"gloo/|c10d|nccl", re.IGNORECASE)


def is_backend_error(kind: str, message: str) -> bool:
    """Whether an exception is the backend's: of a wait for ranks, and not somebody's mistake.

    Args:
        kind: the exception's class.
        message: its text.
    """
    return kind.startswith("Dist") or (kind == "RuntimeError" and bool(_ORIGIN.search(message)))


REPORT_VARIABLE = "SPARSEPIPE_RANK_REPORTS"
"""Environment variable: directory where a failing rank says why."""

_GO_ON = "run the command again, without force=true, to go on from the last checkpoint"
_AGENT_PATIENCE_S = 25.0
"""Less than the elastic agent waits for ranks that it has asked to end."""
_Reports = list[tuple[int, dict[str, Any]]]
"""Ranks and their reports, the earliest first."""


class Stopped(BaseException):
    """The ranks were stopped by a signal, in good order.

    Derived from ``BaseException`` as ``KeyboardInterrupt`` is: nobody should take a stop
    for a failure.

    Args:
        signum: the signal.
        unheard: ranks that did not say that they stopped, as far as known.
        broke: what kept a rank from it, as a checkpoint that could not be written.
    """

    def __init__(
        self,
        signum: int,
        *,
        unheard: Sequence[int] = (),
        broke: SparsePipeError | None = None,
    ) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum
        self.unheard = tuple(unheard)
        self.broke = broke
        self.message = f"stopped by {self}; run the same command again to go on"

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process ended by the signal: 130 for Ctrl-C."""
        return 128 + self.signum


def write_failure_report(error: BaseException, *, exit_code: int, trace: str) -> bool:
    """Leaves word for the launching process why this rank ends, if one waits for it.

    The agent may stop a rank that has already noticed whom it waits for in vain: then that
    is what it tells of, besides that it was stopped.

    Raises:
        OSError: it cannot be written.
    """
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        return False
    stopped = error.signum if isinstance(error, Stopped) else None
    if stopped is not None and isinstance(error.__cause__, TransportError):
        error = error.__cause__
    rank = os.environ.get("RANK", "0")
    known = isinstance(error, SparsePipeError)
    report = {
        "time": time.time(),
        "stopped": stopped,
        "module": type(error).__module__,
        "kind": type(error).__name__,
        "message": error.message if isinstance(error, SparsePipeError) else str(error),
        "remedy": error.remedy if isinstance(error, SparsePipeError) else None,
        "known": known,
        "complains": isinstance(error, TransportError),
        "blames": getattr(error, "blamed", None),
        "trace": trace,
        "place": _place(error).removeprefix(f"rank {rank}, "),
        "exit_code": exit_code,
    }
    partial = Path(directory) / f".rank{rank}.tmp"
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.replace(Path(directory) / f"rank{rank}.json")
    return True


def _place(error: BaseException) -> str:
    """Where it happened: what was closest to it said that first."""
    return str(next(iter(getattr(error, "__notes__", ())), ""))


def unresponsive_mark(directory: Path, rank: int | str) -> Path:
    """A file that says that a rank was killed because it did not end with the others."""
    return directory / f"rank{rank}.late"


def read_reports(directory: Path) -> dict[int, dict[str, Any]]:
    """What ranks left by :func:`write_failure_report`."""
    return {
        int(path.stem.removeprefix("rank")): json.loads(path.read_text(encoding="utf-8"))
        for path in directory.glob("rank*.json")
    }


def broken(found: Mapping[int, dict[str, Any]]) -> SparsePipeError | None:
    """The first rank's error of the house when all were to stop; complaints do not count."""
    for report in sorted(found.values(), key=lambda report: float(report["time"])):
        if report["known"] and not _blames_a_peer(report) and report["stopped"] is None:
            return _revive(report)
    return None


def explain(
    failure: Any, reports: Path, *, name: Callable[[int], str] = "rank {}".format
) -> BaseException:
    """The first rank's failure as an exception for the user.

    A rank that dies makes its peers fail in their collectives or has them stopped by the
    agent, so the earliest report of the house's own errors counts, then a rank that died
    without a word, then the earliest of the rest. An error of the transport gives way to what
    the rank that it blames says itself, and to what is no consequence on any rank.
    """
    found = read_reports(reports)
    by_time = sorted(found.items(), key=lambda item: item[1]["time"])
    for _, report in by_time:
        if report["known"] and not _blames_a_peer(report):
            return _revive(report)
    blaming = [report for _, report in by_time if _blames_a_peer(report)]
    if blaming:
        causes = {rank: report for rank, report in by_time if _is_cause(report)}
        last = _followed(found, blaming[0])
        rank = last["blames"] if last["blames"] in causes else next(iter(causes), None)
        return _revive(last) if rank is None else _raised(rank, causes[rank], name)
    dead = failure.failures
    late = {rank for rank, entry in dead.items() if _killed_late(rank, entry, reports, by_time)}
    silent = {
        rank: entry
        for rank, entry in dead.items()
        if rank not in found and entry.exitcode != -signal.SIGTERM
    }
    if not found and silent.keys() <= late:
        silent = dead  # by SIGTERM, before it could tell: the first was no peer's
    if silent and not (silent.keys() <= late and _blames_itself(by_time)):
        # Those that were found dead in one look have one time, in whole seconds.
        rank, entry = min(silent.items(), key=lambda item: (item[0] in late, item[1].timestamp))
        death = _death(entry, late=rank in late)
        return SparsePipeError(
            f"{name(rank)} {death}; {_noticed(by_time)}the other ranks were ended",
            remedy="see whether the machine runs out of memory or the process was stopped; "
            f"then {_GO_ON}",
        )
    rank, report = by_time[0]
    if report["stopped"] is not None:
        return Stopped(report["stopped"])
    return _raised(rank, report, name)


def _raised(rank: int, report: dict[str, Any], name: Callable[[int], str]) -> SparsePipeError:
    """What is no error of the house, with its traceback."""
    place = f" ({report['place']})" if report["place"] else ""
    said = f"{name(rank)} raised {report['kind']}: {report['message']}{place}"
    return SparsePipeError(
        f"{report['trace'].rstrip()}\n{said}",
        remedy=f"mend the cause, then {_GO_ON}",
    )


def _followed(found: Mapping[int, dict[str, Any]], report: dict[str, Any]) -> dict[str, Any]:
    """What the rank that a report blames says of another one, and so on."""
    seen = [report]
    while (following := found.get(seen[-1]["blames"])) and _blames_a_peer(following):
        if following in seen:
            break
        seen.append(following)
    return seen[-1]


def _blames_a_peer(report: dict[str, Any]) -> bool:
    """Whether it tells of other ranks; not by its name, which users' own errors may have too."""
    return bool(report["complains"])


def _is_cause(report: dict[str, Any]) -> bool:
    """Whether a rank raised something that tells of no wait for another rank."""
    if report["known"] or report["stopped"] is not None:
        return False
    return not is_backend_error(report["kind"], report["message"])


def _blames_itself(by_time: _Reports) -> bool:
    """Whether the first complaint is a cause of its own: it tells of no wait for a rank.

    Then silent ranks that had to be killed were busy when the agent asked them to end for it.
    """
    return bool(by_time) and _is_cause(by_time[0][1])


def _killed_late(rank: int, entry: Any, reports: Path, by_time: _Reports) -> bool:
    """Whether a rank had to be killed, since it still ran well after others had ended.

    The time of its end does not tell: that is when the agent looked, which may be late.
    """
    if entry.exitcode != -signal.SIGKILL:
        return False
    if unresponsive_mark(reports, rank).exists():
        return True
    return bool(by_time) and float(by_time[0][1]["time"]) + _AGENT_PATIENCE_S < entry.timestamp


def _revive(report: dict[str, Any]) -> SparsePipeError:
    module = sys.modules.get(report["module"])
    kind = getattr(module, report["kind"], SparsePipeError)
    if not (isinstance(kind, type) and issubclass(kind, SparsePipeError)):
        kind = SparsePipeError
    return kind(report["message"], remedy=report["remedy"])


def _noticed(by_time: _Reports) -> str:
    """Who first missed a rank that left no word, and where."""
    noticed = [(rank, report["place"]) for rank, report in by_time if report["place"]]
    return f"noticed by rank {noticed[0][0]} ({noticed[0][1]}); " if noticed else ""


def _death(entry: Any, *, late: bool) -> str:
    """How a rank ended that left no report."""
    if entry.exitcode >= 0:
        return f"ended with exit code {entry.exitcode}"
    if late:
        return "did not answer, and still ran when the others had given up"
    return f"was killed by {signal.Signals(-entry.exitcode).name}"


def exit_immediately(error: BaseException, *, exit_code: int | None = None) -> NoReturn:
    """Tells of ``error`` and ends this process without any clean-up.

    What clean-up there is would wait for ranks that are gone: threads that gloo blocks
    cannot be ended, and destroying their groups hangs or aborts. The peers' connections
    break at once, so they hear of it in their next call.

    Args:
        error: what happened; left for the launching process, or printed to stderr where
            that is not possible.
        exit_code: status, never 0; by default the error's own, or 1.
    """
    code = getattr(error, "exit_code", 1) if exit_code is None else exit_code
    trace = "".join(traceback.format_exception(error))
    try:
        told = write_failure_report(error, exit_code=code, trace=trace)
    except OSError:  # a full disk, which may be the very error
        told = False
    # The streams may be files on that disk, or pipes that nobody reads any more.
    with suppress(OSError, ValueError):
        if not told:
            sys.stderr.write(trace)
        logging.shutdown()
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code or 1)
