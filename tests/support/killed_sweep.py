"""A sweep that is killed again and again as by ``kill -9``, and what shows that nothing was lost.

Only the first process is killed: its jobs, their ranks and the processes that try out a batch must
end by themselves.
"""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparsepipe.errors import NoRunsError
from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep.record import records_of
from sparsepipe.utils.files import read_json
from tests.support.command_line import orphans

log = logging.getLogger(__name__)
GOING_ON_S = 600.0
"""How long it may take from one start or end of a run to the next, also on a busy machine."""
DELAY_S = 4.0
Marks = dict[str, tuple[int, int, str]]
"""Of each finished run the file that says so: its number, its time in ns, and what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a sweep is killed.

    Args:
        steps: after so many runs have been started or finished, in all.
        delay_s: and so much later.
    """

    steps: int
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A command that is given again and again.

    Args:
        command: without the interpreter.
        place: the directory to give it in.
        outputs: of its experiment.
    """

    command: str
    place: Path
    outputs: Path

    def runs(self) -> list[RunDir]:
        return [RunDir(path.parent) for path in sorted(self.outputs.glob("*/.starts"))]

    def starts(self) -> dict[str, int]:
        return {run.run_id: len(run.starts) for run in self.runs()}

    def marks(self) -> Marks:
        found = {}
        for run in self.runs():
            if run.done.exists():
                status = run.done.stat()
                found[run.run_id] = (status.st_ino, status.st_mtime_ns, run.done.read_text())
        return found

    def steps(self) -> int:
        return sum(self.starts().values()) + len(self.marks())

    @property
    def log(self) -> Path:
        return self.place / "log.txt"

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        with self.log.open("a") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", *self.command.split()],
                cwd=self.place, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()  # what it has started ends with it
            process.wait()

    def said(self) -> str:
        return self.log.read_text()[-10_000:]


def moments(draw: random.Random, *, kills: int, runs: int) -> list[Moment]:
    """One in each of so many parts of a sweep, in order.

    At the first a run is under way, since an odd number was started or finished: it must be gone
    on with. Some of the others meet jobs that only begin.
    """
    part = 2 * runs // kills
    first = Moment(steps=draw.randrange(1, part, 2), delay_s=0.0)
    later = [
        Moment(steps=draw.randrange(index * part, (index + 1) * part),
               delay_s=draw.uniform(0, DELAY_S))
        for index in range(1, kills)
    ]  # fmt: skip
    return [first, *later]


def kill_at(sweep: Sweep, moment: Moment) -> Marks:
    """Starts the sweep, kills it, and sees all that it had started end; what is finished then."""
    with sweep.started() as process:
        _wait(sweep, process, moment.steps)
        time.sleep(moment.delay_s)
        assert process.poll() is None, f"it ended before it could be killed:\n{sweep.said()}"
        process.kill()
        process.wait()
    assert not orphans(sweep.place), "jobs end with it"
    done = sweep.marks()
    log.info("killed at %s: finished %d, started %s", moment, len(done), sweep.starts())
    assert_whole_so_far(sweep)
    return done


def _wait(sweep: Sweep, process: subprocess.Popen[bytes], steps: int) -> None:
    """Until so many runs have been started or finished, or the sweep has ended."""
    seen, since_s = sweep.steps(), time.monotonic()
    while process.poll() is None and seen < steps:
        assert time.monotonic() - since_s < GOING_ON_S, f"it did not go on:\n{sweep.said()}"
        time.sleep(0.05)
        if (now := sweep.steps()) != seen:
            seen, since_s = now, time.monotonic()


def assert_whole_so_far(sweep: Sweep) -> None:
    """Runs that are marked as finished are the rows that a ledger would have."""
    try:
        told = set(load_results(sweep.outputs)["run_id"])
    except NoRunsError:
        told = set()
    assert told == set(sweep.marks())


def finish(sweep: Sweep, *, limit_s: float) -> None:
    with sweep.started() as process:
        code = process.wait(timeout=limit_s)
    assert code == 0, sweep.said()
    assert not orphans(sweep.place)


def assert_none_twice(sweep: Sweep, before: list[Marks]) -> None:
    """No run that was finished at a kill was begun or marked again, nor did two jobs finish one.

    Args:
        sweep: that has ended.
        before: the marks after each kill.
    """
    now = sweep.marks()
    for marks in before:
        assert marks.items() <= now.items()
    for run in sweep.runs():
        last = run.starts[-1]
        assert last is not None
        assert last < float(read_json(run.done)["time"]), f"{run.run_id} began after its end"
        assert read_json(run.result)["starts"] == len(run.starts)
    sweeps = sorted(sweep.outputs.glob("sweeps/*"))
    records = [[one for one in records_of(path) if one.run] for path in sweeps]
    finished = Counter(one.run for found in records for one in found if not one.before)
    assert max(finished.values()) == 1
    skipped = {Path(str(one.run)).name for one in records[-1] if one.before}
    assert skipped == set(before[-1])
