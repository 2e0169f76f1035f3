"""Ranks of a pipeline that die, stand still or raise: all end soon, and the run can go on."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command_line import Shell, orphans
from tests.support.fault_cases import (
    BLAMED,
    EPOCHS,
    KINDS,
    LEAVING_S,
    PIPELINE,
    STEPS,
    TIMEOUT_S,
    Point,
    assert_same,
    ended_s,
    fails_in_time,
    named,
)

pytestmark = pytest.mark.full  # waits for limits, a minute and more each


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


POINTS = [drawn(number, draw) for draw in [random.Random(20)] for number in range(18)]
"""With 18 every kind meets every phase once."""
CUTS = [
    Point(config="1-1-1", kind="cut off", phase="steady", rank=1, place="batch", epoch=1, count=4),
    Point(config="2-1", kind="cut off", phase="drain", rank=0, place="update", epoch=0, count=3),
]


QUICK = [
    Point(config="1-1", kind="killed", phase="drain", rank=1, place="update", epoch=1, count=7),
    Point(config="1-1", kind="stopped", phase="steady", rank=0, place="batch", epoch=1, count=4),
    Point(config="1-1", kind="raises", phase="warm-up", rank=0, place="batch", epoch=2, count=0),
]


@pytest.mark.parametrize("point", QUICK, ids=lambda point: point.id)
def test_ranks_begin_again_by_themselves(
    shell: Shell, undisturbed: Callable[[Point], Path], point: Point
) -> None:
    expected = undisturbed(point)
    killed = point.kind == "killed"  # which no rank has to wait for until the limit
    limit = ["parallel.strategy.timeout_s=100"] if killed else []
    again = shell(*point.settings, *limit, "parallel.max_restarts=1", timeout_s=180)
    assert (shell.cwd / "injected").exists()
    assert not killed or ended_s(shell.cwd) < 90
    (told,) = [line for line in again.err.splitlines() if f"rank {point.rank} (stage" in line]
    assert f"rank {point.rank} (stage {point.stage})" in told
    assert not killed or re.search(rf"\(stage {point.stage}\) {BLAMED}", told), told
    # The agent may end the witness before it has noticed: that a minibatch is named is for
    # the longer tests.
    assert not killed or named(told) <= set(point.under_way), told
    assert "restart 1 of 1" in again.err
    assert_same(again.run, expected)
    assert not orphans(shell.cwd)


def test_mistakes_are_not_made_again(shell: Shell) -> None:
    refused = shell(*PIPELINE, "parallel.max_restarts=3", "parallel.plan.cuts=[9]")
    assert refused.code == 2
    assert "cuts [9] do not split 5 layers into 2 stages" in refused.err
    assert "beginning again" not in refused.err


@pytest.mark.parametrize("point", [*POINTS, *CUTS], ids=lambda point: point.id)
def test_every_fault_ends_all_ranks_and_the_run_goes_on(
    shell: Shell, undisturbed: Callable[[Point], Path], point: Point
) -> None:
    fails_in_time(shell, point)
    run = shell(*point.settings, timeout_s=180).run
    assert_same(run, undisturbed(point))


def test_torchrun_begins_again_where_the_first_ranks_met(
    shell: Shell, undisturbed: Callable[[Point], Path]
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
    assert_same(run, undisturbed(point))


@pytest.mark.parametrize(
    ("config", "kind", "rank"),
    [
        *[("1-1", kind, 1) for kind in KINDS],
        *[(config, kind, 1) for config in ("1-2", "2-1") for kind in ("killed", "stopped")],
    ],
)
def test_faults_under_torchrun(shell: Shell, config: str, kind: str, rank: int) -> None:
    point = Point(
        config=config, kind=kind, phase="steady", rank=rank, place="batch", epoch=0, count=2
    )
    ranks = sum(int(part) for part in config.split("-"))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
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
    if kind == "raises":
        assert "somebody's own mistake" in failed.stderr
        return
    told = re.findall(rf"error: .*?(rank \d+ \(stage \d+\)) {BLAMED}", failed.stderr)
    assert told, failed.stderr
    assert {culprit for culprit, _ in told} == {f"rank {rank} (stage {point.stage})"}
