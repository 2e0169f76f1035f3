"""A sweep that is killed again and again, and started again each time."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from experiment_harness import Shell, orphans, rows, weights

from sparsepipe.experiment.sweep.record import records_of
from sparsepipe.results.files import read_json

KILLS, EPOCHS, SEEDS = 5, 3, 4
SWEEP = (
    "hydra/launcher=sparsepipe",
    "hydra.launcher.cores_per_rank=1",
    "hardware.accelerator=cpu",
    f"trainer.max_epochs={EPOCHS}",
    f"seed={','.join(map(str, range(SEEDS)))}",
    "data.delay_s=0.02",
    "optim.optimizer.lr=0.1",
)
LIMIT_S = 280.0


def epochs(shell: Shell) -> int:
    """Of all runs so far."""
    total = 0
    for table in shell.cwd.glob("outputs/tiny/*/metrics.csv"):
        total += max(0, len(table.read_text().splitlines()) - 1)
    return total


def finished(shell: Shell) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in shell.cwd.glob("outputs/*/*/DONE.json")}


def kill_after(shell: Shell, sweep: subprocess.Popen[str], count: int, delay_s: float) -> bool:
    """Kills a sweep a while after so many epochs; whether that was before its end."""
    deadline_s = time.monotonic() + LIMIT_S
    while epochs(shell) < count and sweep.poll() is None:
        assert time.monotonic() < deadline_s, "it did not go on"
        time.sleep(0.01)
    time.sleep(delay_s)
    before = sweep.poll() is None
    sweep.kill()
    shell.wait(sweep)
    return before


def what_counts(run: Path) -> dict[str, object]:
    """Of a result: what was trained, and what came of it; not how long it took."""
    names = ("epochs", "steps", "seed", "kind", "run_id", "ranks", "best_monitored")
    return {
        key: value
        for key, value in read_json(run / "result.json").items()
        if key in names or (key.startswith(("test/", "val/", "train/")) and "_per_s" not in key)
    }


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_it_ends_with_what_an_undisturbed_one_has(shell: Shell, tmp_path: Path) -> None:
    draw = random.Random(6)
    # At the moments after so many epochs of all; from the start of a process to its first epoch is
    # most of the time, so that some meet jobs that only begin.
    moments = sorted(draw.sample(range(SEEDS * EPOCHS), KILLS))
    done: dict[str, str] = {}
    killed = 0
    for moment in moments:
        sweep = shell.start(*SWEEP, "hydra.mode=MULTIRUN")
        killed += kill_after(shell, sweep, moment, draw.uniform(0, 0.5))
        assert not orphans(shell.cwd), "jobs end with it"
        for name, text in done.items():
            assert finished(shell)[name] == text, "done is done"
        done = finished(shell)
        for name in done:
            assert len(rows(shell.cwd / "outputs/tiny" / name)) == EPOCHS, "no partial row"
    assert killed >= KILLS - 1, "the last one may be late"
    last = shell.sweep(*SWEEP, timeout_s=LIMIT_S)
    assert last.code == 0, last.err
    for name, text in done.items():
        assert finished(shell)[name] == text
    undisturbed = Shell(tmp_path / "undisturbed")
    undisturbed.cwd.mkdir()
    assert undisturbed.sweep(*SWEEP, timeout_s=LIMIT_S).code == 0
    runs = shell.runs()
    expected = undisturbed.runs()
    assert [run.name for run in runs] == [run.name for run in expected]
    assert len(runs) == SEEDS, "no job is lost"
    for run, same in zip(runs, expected, strict=True):
        assert what_counts(run) == what_counts(same)
        assert (weights(run) == weights(same)).all()
        assert [row["epoch"] for row in rows(run)] == [row["epoch"] for row in rows(same)]
        assert [row["val/loss"] for row in rows(run)] == [row["val/loss"] for row in rows(same)]
    ended = max(shell.cwd.glob("outputs/tiny/sweeps/*"))
    assert [record.status for record in records_of(ended)] == SEEDS * ["finished"]
    assert len((ended / "table.csv").read_text().splitlines()) == 1 + SEEDS
