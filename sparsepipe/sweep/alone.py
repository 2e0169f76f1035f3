"""A sweep's directory is that of one sweep at a time; what an earlier one has left is put aside."""

from __future__ import annotations

import fcntl
import itertools
import logging
from pathlib import Path
from typing import IO

from sparsepipe.config.outputs import writing
from sparsepipe.errors import ConfigError

log = logging.getLogger(__name__)
_JOBS, _REPORT = "jobs", "report"
_FILES = ("optimization_results.yaml", "table.csv", "table.md")
_OF_A_JOB = ("job.yaml", "record.json", "started.json")
_held: list[IO[str]] = []
"""The lock of this process's sweep, which ends with the process at the latest."""


def take(sweep: Path, *, reports: bool = False) -> None:
    """Makes a directory that of this process's sweep, which begins now.

    Sweepers that search start jobs several times in one sweep: this is for its beginning alone.

    Args:
        sweep: the directory.
        reports: the sweep's end makes a report.

    Raises:
        ConfigError: another sweep runs in it, or what this one writes is there as somebody's own.
        OutputError: it cannot be written.
    """
    give_back()
    with writing(sweep):
        _refuse_what_is_not_ours(sweep, reports=reports)
        sweep.mkdir(parents=True, exist_ok=True)
        lock = (sweep / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigError(
                f"another sweep runs in {sweep}",
                remedy="wait for it or end it, or give this one a hydra.sweep.dir of its own",
            ) from None
        _held.append(lock)
        _put_aside(sweep)


def give_back() -> None:
    """Lets other sweeps have the directory."""
    while _held:
        _held.pop().close()


def _refuse_what_is_not_ours(sweep: Path, *, reports: bool) -> None:
    """Nothing is moved, mixed into or written over that no sweep has left."""
    written = [_JOBS, *_FILES, *([_REPORT] if reports else [])]
    ours = _left(sweep)
    for path in (sweep / name for name in written if name not in ours):
        if _is_there(path):
            raise ConfigError(
                f"{path} is in the way: a sweep writes what is called so, and no sweep has left "
                "this",
                remedy=f"give this one a directory of its own, as hydra.sweep.dir={sweep / 'sweep'}"
                ", or move that",
            )


def _put_aside(sweep: Path) -> None:
    left = _left(sweep)
    if not left:
        return
    places = (sweep / "earlier" / str(number) for number in itertools.count(1))
    place = next(place for place in places if not place.exists())
    place.mkdir(parents=True)
    for name in left:
        (sweep / name).rename(place / name)
    log.info("what an earlier sweep has left in %s is in %s now", sweep, place)


def _left(sweep: Path) -> list[str]:
    """What an earlier sweep has left: its jobs tell that there was one, and none is without."""
    if not _is_of_jobs(sweep / _JOBS):
        return []
    files = [name for name in _FILES if (sweep / name).exists()]
    return [_JOBS, *files, *([_REPORT] if _is_of_a_report(sweep / _REPORT) else [])]


def _is_of_jobs(path: Path) -> bool:
    found = (file for name in _OF_A_JOB for file in path.glob(f"*/{name}"))
    return any(file.parent.name.isdecimal() for file in found)


def _is_of_a_report(path: Path) -> bool:
    """Also of one whose making was ended before it had a page."""
    if not path.is_dir():
        return False
    from sparsepipe.results.report.exhibits import EXHIBITS

    names = ("report.html", *(f"{exhibit}.csv" for exhibit in EXHIBITS))
    return any((path / name).is_file() for name in names)


def _is_there(path: Path) -> bool:
    """Whether there is more than directories and hidden files, as killed processes leave them."""
    if not path.is_dir():
        return path.exists()
    return any(not (each.is_dir() or each.name.startswith(".")) for each in path.rglob("*"))
