"""Ranks of a pipeline that die, stand still or raise: all end soon, and the run can go on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from experiment_harness import Finished, Shell, checkpoint, orphans, rows

TIMEOUT_S = 20  # of the ranks' waits: shorter, and a busy machine's slow start would be a fault
PATIENCE_S = 5  # with ranks that do not end after another one has failed
LEAVING_S = 10  # for processes to end and to be seen ended, on a busy machine
EPOCHS, STEPS = 3, 8

PIPELINE = (
    "parallel=pipeline",
    "hardware=cores",
    f"parallel.strategy.timeout_s={TIMEOUT_S}",
    f"trainer.max_epochs={EPOCHS}",
    "model.norm=true",
    "model.dropout=0.5",
)
KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "raises": 0}


@dataclass(frozen=True)
class Point:
    """Where a fault is put, and what it is."""

    config: str
    kind: str
    phase: str
    rank: int
    place: str
    epoch: int
    count: int

    @property
    def id(self) -> str:
        return f"{self.config} {self.kind} {self.phase} rank {self.rank} {self.place} {self.count}"

    @property
    def stage(self) -> int:
        replicas = [int(part) for part in self.config.split("-")]
        return [s for s, count in enumerate(replicas) for _ in range(count)][self.rank]

    @property
    def settings(self) -> tuple[str, ...]:
        node = (
            f"_target_: tinyfaults.Injection, rank: {self.rank}, place: {self.place}, "
            f"signum: {int(KINDS[self.kind])}, epoch: {self.epoch}, count: {self.count}"
        )
        return (
            *PIPELINE,
            f"parallel.plan.config={self.config}",
            f"callbacks={{fault: {{{node}}}}}",
        )


def drawn(number: int, draw: random.Random) -> Point:
    """Every kind meets every phase, on random ranks of random plans at random steps."""
    config = draw.choice(["1-1", "1-1-1", "2-1", "1-2"])
    replicas = [int(part) for part in config.split("-")]
    rank = draw.randrange(sum(replicas))
    stage = [s for s, count in enumerate(replicas) for _ in range(count)][rank]
    steps = STEPS // replicas[0]  # of Lightning, an epoch
    updates = STEPS // replicas[stage]
    ahead = (sum(replicas[stage:]) - 1) // replicas[stage]
    phase = ["start", "warm-up", "steady", "drain", "validation", "checkpoint"][number % 6]
    place, least, most = {
        "start": ("start", 0, 0),
        "warm-up": ("batch", 0, 1),
        "steady": ("batch", 2, steps - 1),
        "drain": ("update", updates - 1 - ahead // 2, updates - 1),
        "validation": ("validation", 0, (2 if replicas[0] == 1 else 1) - 1),
        "checkpoint": ("checkpoint", 0, 0),
    }[phase]
    return Point(
        config=config,
        kind=list(KINDS)[(number + number // 6) % 3],
        phase=phase,
        rank=rank,
        place=place,
        epoch=0 if phase == "start" else draw.randrange(EPOCHS),
        count=draw.randint(least, most),
    )


POINTS = [drawn(number, draw) for draw in [random.Random(20)] for number in range(20)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a plan that nothing happens to."""
    found: dict[str, Path] = {}

    def run(config: str) -> Path:
        if config not in found:
            shell = Shell(tmp_path_factory.mktemp("undisturbed"))
            found[config] = shell(*PIPELINE, f"parallel.plan.config={config}").run
        return found[config]

    return run


def ended_s(directory: Path) -> float:
    """Seconds since the fault."""
    return time.time() - (directory / "injected").stat().st_mtime


def assert_told(failed: Finished, point: Point) -> None:
    """One message that names rank and stage, and the minibatch or batch it was at."""
    assert failed.code > 0
    assert failed.err.count("error: ") == 1, failed.err
    assert failed.err.count("remedy:") == 1, failed.err
    told = failed.err[failed.err.index("error: ") :]
    assert f"rank {point.rank} (stage {point.stage})" in told, told
    if point.phase != "start":
        assert "batch" in told, told
    assert ("somebody's own mistake" in told) == (point.kind == "raises"), told


def assert_same(run: Path, expected: Path) -> None:
    """The weights and statistics of an undisturbed run, and each epoch once."""
    ours, theirs = checkpoint(run)["state_dict"], checkpoint(expected)["state_dict"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert [row["epoch"] for row in rows(run)] == [str(epoch) for epoch in range(EPOCHS)]
    losses = [[row["val/loss"] for row in rows(path)] for path in (run, expected)]
    assert losses[0] == losses[1]


def fails_in_time(shell: Shell, point: Point) -> None:
    failed = shell(*point.settings, timeout_s=180)
    assert (shell.cwd / "injected").exists(), "the fault did not come about"
    assert ended_s(shell.cwd) < TIMEOUT_S + PATIENCE_S + LEAVING_S
    assert not orphans(shell.cwd)
    assert_told(failed, point)


QUICK = [
    Point(config="1-1", kind="killed", phase="drain", rank=1, place="update", epoch=1, count=7),
    Point(config="1-1", kind="stopped", phase="steady", rank=0, place="batch", epoch=1, count=4),
    Point(config="1-1", kind="raises", phase="warm-up", rank=0, place="batch", epoch=2, count=0),
]


@pytest.mark.full  # waits for limits, a minute and more each
@pytest.mark.parametrize("point", QUICK, ids=lambda point: point.id)
def test_ranks_begin_again_by_themselves(
    shell: Shell, undisturbed: Callable[[str], Path], point: Point
) -> None:
    expected = undisturbed(point.config)
    again = shell(*point.settings, "parallel.max_restarts=1", "parallel.strategy.timeout_s=10")
    assert f"rank {point.rank} (stage {point.stage})" in again.err
    assert "restart 1 of 1" in again.err
    assert_same(again.run, expected)


def test_mistakes_are_not_made_again(shell: Shell) -> None:
    refused = shell(*PIPELINE, "parallel.max_restarts=3", "parallel.plan.cuts=[9]")
    assert refused.code == 2
    assert "cuts [9] do not split 5 layers into 2 stages" in refused.err
    assert "beginning again" not in refused.err


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.id)
def test_every_fault_ends_all_ranks_and_the_run_goes_on(
    shell: Shell, undisturbed: Callable[[str], Path], point: Point
) -> None:
    fails_in_time(shell, point)
    run = shell(*point.settings, timeout_s=180).run
    assert_same(run, undisturbed(point.config))


@pytest.mark.full
def test_torchrun_begins_again_where_the_first_ranks_met(
    shell: Shell, undisturbed: Callable[[str], Path]
) -> None:
    """Its store outlives the ranks, and with it the addresses of the dead."""
    point = Point(
        config="1-2", kind="killed", phase="steady", rank=1, place="batch", epoch=1, count=5
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    done = subprocess.run(
        [sys.executable, *launcher, "--max-restarts=1", "-m", *shell.command(*point.settings)],
        cwd=shell.cwd,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (shell.cwd / "injected").exists()
    (run,) = shell.runs()
    assert_same(run, undisturbed(point.config))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_faults_under_torchrun(shell: Shell, kind: str) -> None:
    point = Point(config="1-1", kind=kind, phase="steady", rank=1, place="batch", epoch=0, count=5)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    failed = subprocess.run(
        [sys.executable, *launcher, "-m", *shell.command(*point.settings)],
        cwd=shell.cwd,
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert failed.returncode
    assert ended_s(shell.cwd) < TIMEOUT_S + 30 + LEAVING_S  # torchrun's own patience
    told = "somebody's own mistake" if kind == "raises" else "rank 1 (stage 1)"
    assert told in failed.stderr
