"""A sweep that is killed again and again, and started again each time."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from sparsepipe.errors import DataError
from sparsepipe.runs.ledger import load_results
from sparsepipe.sweep.record import records_of
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, orphans, rows, weights
from tests.support.same_ledgers import is_of_the_moment

KILLS, EPOCHS, SEEDS = 3, 2, 1
TRIALS, TRAININGS = ("one_device", "two_ranks", "batch_search"), 2
PROBES = 4  # of conf/paper/trial/batch_search.yaml: 2, 4, 8 and 16 shapes
SWEEP = (
    "hydra/launcher=sparsepipe",
    "hydra.launcher.cores_per_rank=1",
    "hardware.accelerator=cpu",
    f"paper/trial={','.join(TRIALS)}",
    f"trainer.max_epochs={EPOCHS}",
    f"seed={','.join(map(str, range(SEEDS)))}",
    "data.delay_s=0.02",
    "optim.optimizer.lr=0.1",
)
JOBS = len(TRIALS) * SEEDS
LIMIT_S = 900.0  # of a whole sweep


def work_done(shell: Shell) -> int:
    """Epochs of all trainings and answers of all searches so far."""
    total = 0
    for table in shell.cwd.glob("outputs/tiny/*/metrics.csv"):
        total += max(0, len(table.read_text().splitlines()) - 1)
    for answers in shell.cwd.glob("outputs/tiny/*/probes.json"):
        total += len(read_json(answers))
    return total


def finished(shell: Shell) -> dict[str, str]:
    """What marks each finished run."""
    return {path.parent.name: path.read_text() for path in shell.cwd.glob("outputs/*/*/DONE.json")}


@contextmanager
def completions(shell: Shell) -> Iterator[dict[str, set[str]]]:
    """All marks that each run has had while the block runs, where it may be finished anew.

    A run takes seconds from a mark to the next, and is looked at a hundred times in each.
    """
    seen: dict[str, set[str]] = {}
    over = threading.Event()

    def look() -> None:
        last = False
        while not last:
            last = over.wait(0.01)  # once more after all has ended
            for run, mark in finished(shell).items():
                seen.setdefault(run, set()).add(mark)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield seen
    finally:
        over.set()
        watch.join()


def kill_after(shell: Shell, sweep: subprocess.Popen[str], count: int, delay_s: float) -> bool:
    """Kills a sweep a while after so much work; whether that was before its end."""
    deadline_s = time.monotonic() + LIMIT_S
    while work_done(shell) < count and sweep.poll() is None:
        assert time.monotonic() < deadline_s, "it did not go on"
        time.sleep(0.01)
    time.sleep(delay_s)
    before = sweep.poll() is None
    sweep.kill()
    shell.wait(sweep)
    return before


def assert_whole_so_far(shell: Shell) -> None:
    """What counts as finished has all of its epochs or its answer, and is a row of a ledger."""
    done = finished(shell)
    for name in done:
        run = shell.cwd / "outputs/tiny" / name
        task = read_json(run / "result.json")["task_name"]
        assert task == "fit_batch" or len(rows(run)) == EPOCHS
    try:
        told = set(load_results(shell.cwd / "outputs/tiny")["run_id"])
    except DataError:  # nothing is finished yet
        told = set()
    assert told == set(done)


def ledger(shell: Shell) -> pd.DataFrame:
    """What of a ledger is the same in each sweep."""
    frame = load_results(shell.cwd / "outputs/tiny/ledger.parquet")
    return frame[[name for name in frame.columns if not is_of_the_moment(name)]]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_it_ends_with_what_an_undisturbed_one_has(shell: Shell, tmp_path: Path) -> None:
    """Trainings on one device and on two, and searches for the largest batch."""
    draw = random.Random(6)
    # At the moments after so much work of all; from the start of a process to its first epoch is
    # most of the time, so that some meet jobs that only begin.
    work = SEEDS * (TRAININGS * EPOCHS + PROBES)
    killed = 0
    with completions(shell) as completed:
        for moment in sorted(draw.sample(range(work), KILLS)):
            sweep = shell.start(*SWEEP, "hydra.mode=MULTIRUN")
            killed += kill_after(shell, sweep, moment, draw.uniform(0, 0.5))
            assert not orphans(shell.cwd), "jobs end with it"
            assert_whole_so_far(shell)
        last = shell.sweep(*SWEEP, timeout_s=LIMIT_S)
        assert last.code == 0, last.err
    assert killed >= KILLS - 1, "the last one may be late"
    assert {run: len(marks) for run, marks in completed.items()} == {
        run.name: 1 for run in shell.runs()
    }, "each is finished once"
    undisturbed = Shell(tmp_path / "undisturbed")
    undisturbed.cwd.mkdir()
    whole = undisturbed.sweep(*SWEEP, timeout_s=LIMIT_S)
    assert whole.code == 0, whole.err
    assert_same(shell, undisturbed)
    ended = max(shell.cwd.glob("outputs/tiny/sweeps/*"))
    assert [record.status for record in records_of(ended)] == JOBS * ["finished"]
    assert len((ended / "table.csv").read_text().splitlines()) == 1 + JOBS


def assert_same(ours: Shell, theirs: Shell) -> None:
    """No job is lost, and all that does not depend on the moment is as if nothing had happened."""
    assert len(ours.runs()) == JOBS
    found, expected = ledger(ours), ledger(theirs)
    assert {"run_id", "seed", "ranks", "epochs", "steps", "train/loss", "val/loss", "test/accuracy",
            "largest_batch", "refused_batch", "probed_batches"} <= set(found.columns)  # fmt: skip
    assert_frame_equal(found, expected, check_exact=True)
    assert sorted(found["ranks"]) == [1, 1, 2]
    assert set(found["largest_batch"].dropna()) == {8}
    for run, same in zip(ours.runs(), theirs.runs(), strict=True):
        if (run / "probes.json").exists():
            continue
        assert (weights(run) == weights(same)).all()
        for name in ("epoch", "train/loss", "val/loss"):
            assert [row[name] for row in rows(run)] == [row[name] for row in rows(same)]
