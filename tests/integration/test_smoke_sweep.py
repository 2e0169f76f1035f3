"""Table II as small as can be, killed on its way: from one command to report, ledger and notebook.

A quarter of it, all points at 32 voxels, is killed once (``make smoke``), the whole of it at five
moments (``make test-full``), as by ``kill -9``, and given again. It takes minutes: every cell and
every size of a batch that is tried has processes of its own, which must end by themselves."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from pandas.testing import assert_frame_equal

from sparsepipe.errors import NoRunsError
from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep.record import records_of
from sparsepipe.utils.files import read_json
from tests.support.command_line import orphans
from tests.support.reported_cells import cells, there
from tests.support.same_ledgers import assert_as_recorded, is_of_the_moment

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


ROOT = Path(__file__).parents[2]
COMMAND = "sparsepipe -m experiment=table2 scale=smoke"
RECORDED = ROOT / "experiments" / "table2_smoke" / "ledger.csv"
"""What the command leaves undisturbed; record it anew where the settings of such runs change."""
SEED = 2026
LIMIT_S = 3600
HEADS = ("grid", "devices", "network", "p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What of the table is swept, and how many of its jobs are of each kind, in this order."""

    overrides: str
    grids: tuple[int, ...]
    point_ratios: tuple[float, ...]
    trainings: int
    searches: int

    @property
    def runs(self) -> int:
        return self.trainings + self.searches


WHOLE = Part(overrides="", grids=(32, 50), point_ratios=(1.0, 0.5, 0.25), trainings=16, searches=8)
QUARTER = Part(
    overrides=" data.resolution=32 paper/network=dense,sparse",
    grids=(32,),
    point_ratios=(1.0,),
    trainings=4,
    searches=2,
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Part], Sweep]:
    for name in [name for name in os.environ if name.startswith("SPARSEPIPE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    outputs = tmp_path / "outputs" / "table2"
    return lambda part: Sweep(command=COMMAND + part.overrides, place=tmp_path, outputs=outputs)


@pytest.mark.smoke
@pytest.mark.timeout(LIMIT_S)
def test_a_quarter_of_the_smallest_table_2_is_whole_though_it_was_killed(
    start: Callable[[Part], Sweep],
) -> None:
    """In the middle of a training."""
    sweep = start(QUARTER)
    (moment,) = moments(random.Random(SEED), kills=1, runs=QUARTER.trainings)
    _check(sweep, QUARTER, [kill_at(sweep, moment)])


@pytest.mark.full
@pytest.mark.timeout(2 * LIMIT_S)
def test_the_smallest_table_2_is_whole_though_it_was_killed_five_times(
    start: Callable[[Part], Sweep],
) -> None:
    assert COMMAND in (ROOT / "docs" / "first_experiment.md").read_text()
    sweep = start(WHOLE)
    kills = moments(random.Random(SEED), kills=5, runs=WHOLE.runs)
    _check(sweep, WHOLE, [kill_at(sweep, moment) for moment in kills])
    _check_notebook(sweep.place)


def _check(sweep: Sweep, part: Part, killed: list[Marks]) -> None:
    finish(sweep, limit_s=LIMIT_S)
    assert len(sweep.runs()) == len(sweep.marks()) == part.runs
    assert_none_twice(sweep, killed)
    _check_report(_ended(sweep) / "report" / "table2.csv", part)
    ledger = _ledger(sweep, part)
    recorded = load_results(RECORDED)
    swept = recorded["data.resolution"].isin(part.grids)
    swept &= recorded["data.point_ratio"].isin(part.point_ratios)
    assert_as_recorded(ledger, recorded[swept])
    _check_interrupted(sweep, ledger)


def _ended(sweep: Sweep) -> Path:
    """The directory of the last one, which came to its end."""
    return max(sweep.outputs.glob("sweeps/*"))


def _check_report(file: Path, part: Part) -> None:
    """Each cell of what was swept has a figure of ours, or words in its place."""
    (empty,) = CHAPTERS["table2"].blocks([])
    grids = {f"{grid}³" for grid in part.grids}
    ratios = {f"{ratio:g}" for ratio in part.point_ratios}
    expected = {
        (*cell.row, cell.column.key)
        for cell in empty.cells
        if cell.row[0] in grids and cell.row[-1] in ratios
    }
    assert there(file, *HEADS) == expected
    found = cells(file, *HEADS)
    accuracies = [float(found[place]["ours"]) for place in expected if "accuracy" in place[-1]]
    assert len(accuracies) == 2 * part.trainings
    assert all(0 <= accuracy <= 100 for accuracy in accuracies)
    assert file.with_name("report.html").exists()
    assert file.with_suffix(".png").exists()


def _ledger(sweep: Sweep, part: Part) -> pd.DataFrame:
    ledger = load_results(sweep.outputs / "ledger.csv")
    assert Counter(ledger["task_name"]) == {
        "train": part.trainings,
        "fit_batch": part.searches,
    }
    assert Counter(ledger["ranks"]) == {1: part.runs * 2 // 3, 4: part.runs // 3}
    assert set(ledger["scale"]) == {"smoke"}
    assert list(ledger["run_id"]) == list(load_results(sweep.outputs)["run_id"])
    assert dict(zip(ledger["run_id"], ledger["starts"], strict=True)) == sweep.starts()
    return ledger


def _check_interrupted(sweep: Sweep, ledger: pd.DataFrame) -> None:
    """Some runs were gone on with; a training of these is as one that nothing has disturbed."""
    assert (ledger["starts"] > 1).any()
    trained = ledger[(ledger["starts"] > 1) & (ledger["task_name"] == "train")]
    run = str(trained["run_id"].iloc[0])
    (record,) = [one for one in records_of(_ended(sweep)) if Path(str(one.run)).name == run]
    undisturbed = Sweep(
        command=f"sparsepipe -m {' '.join(record.overrides)} paths.outputs=undisturbed",
        place=sweep.place,
        outputs=sweep.place / "undisturbed" / "table2",
    )
    finish(undisturbed, limit_s=LIMIT_S / 6)
    theirs = load_results(undisturbed.outputs / "ledger.csv")
    assert list(theirs["run_id"]) == [run]
    same = [name for name in theirs.columns if not is_of_the_moment(name)]
    ours = ledger[ledger["run_id"] == run].reset_index(drop=True)
    assert_frame_equal(ours[same], theirs[same], check_exact=True, check_dtype=False)


def _check_notebook(place: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "table2.ipynb", as_version=4)
    where = {"metadata": {"path": str(place)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    texts = "\n".join(
        output.get("data", {}).get("text/markdown", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert "Nothing is missing." in texts


Change = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.fixture(scope="module")
def ledger() -> pd.DataFrame:
    return load_results(RECORDED)


def setting(column: str, value: object, *, at: int | slice = 0) -> Change:
    """Sets a cell of a column, or all of them; the first row is of a training."""

    def change(frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame.astype({column: object})
        frame.loc[frame.index[at], column] = value
        return frame

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.drop(index=frame.index[5]),
        setting("test/accuracy", None),
        setting("steps", 3),
        setting("data.resolution", 32, at=slice(None)),
        setting("train/loss", 1.0),
        setting("run_id", "0123456789ab"),
    ],
)
def test_changed_ledgers_are_detected(ledger: pd.DataFrame, change: Change) -> None:
    assert sorted(ledger["task_name"]) == 8 * ["fit_batch"] + 16 * ["train"]
    with pytest.raises(AssertionError):
        assert_as_recorded(change(ledger), ledger)


@pytest.mark.parametrize(
    "changes",
    [
        [setting("starts", 3), setting("epoch_time_s", 9.0), setting("git_commit", "0" * 40)],
        [setting("cuda", None, at=slice(None)), setting("train/loss", 1.0)],
        [setting("hardware_devices", "other", at=slice(None)), setting("run_id", "0123456789ab")],
        [lambda frame: frame.assign(**{"task.new": 1}), setting("run_id", "0123456789ab")],
    ],
)
def test_what_may_differ_passes(ledger: pd.DataFrame, changes: list[Change]) -> None:
    found = ledger
    for change in changes:
        found = change(found)
    assert_as_recorded(found, ledger)
