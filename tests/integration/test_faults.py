"""Ranks of a pipeline that die, stand still or raise: all end soon, and the run can go on."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, orphans
from tests.support.fault_cases import (
    BLAMED,
    EPOCHS,
    KINDS,
    LEAVING_S,
    PIPELINE,
    STEPS,
    TIMEOUT_S,
    TRAINING,
    Point,
    assert_same,
    ended_s,
    fails_in_time,
    named,
)
from tests.support.recompute_cases import given

# Waits for limits, a minute and more each.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


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
    done = shell.torchrun(3, *point.settings, restarts=1)
    assert done.returncode == 0, done.stderr
    assert (shell.cwd / "injected").exists()
    (run,) = shell.runs()
    assert_same(run, undisturbed(point))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        *(("1-1", kind) for kind in KINDS),
        *((config, kind) for config in ("1-2", "2-1") for kind in ("killed", "stopped")),
    ],
)
def test_faults_under_torchrun(shell: Shell, config: str, kind: str) -> None:
    point = Point(config=config, kind=kind, phase="steady", rank=1, place="batch", epoch=0, count=2)
    ranks = sum(int(part) for part in config.split("-"))
    failed = shell.torchrun(ranks, *point.settings)
    assert failed.returncode
    assert ended_s(shell.cwd) < TIMEOUT_S + 30 + LEAVING_S  # torchrun's own patience
    if kind == "raises":
        assert "somebody's own mistake" in failed.stderr
        return
    told = re.findall(rf"error: .*?(rank \d+ \(stage \d+\)) {BLAMED}", failed.stderr)
    assert told, failed.stderr
    assert {culprit for culprit, _ in told} == {f"rank 1 (stage {point.stage})"}


RECOMPUTED = (*TRAINING, "model.norm=true", "parallel.strategy.recompute=all")
# A batch of four in microbatches of 2, 1 and 1: what norms have to do without in `running`.
ONE_F_ONE_B = (
    *(*RECOMPUTED, "parallel=sync_1f1b"),
    *("parallel.strategy.microbatches=3", "parallel.strategy.batch_norm=running"),
)
# Two of two from each of two readers.
GPIPE = (
    *(*RECOMPUTED, "parallel=gpipe"),
    *("parallel.strategy.microbatches=4", "parallel.strategy.batch_norm=deferred"),
)
DEVICE = "{name: core, count: 2, accelerator: cpu, memory_bytes: 1400000}"
CHOSEN = (
    *(*TRAINING, "parallel=gpipe", "parallel.plan.cuts=[2]", "parallel.strategy.recompute=auto"),
    f"hardware.value.hosts=[{{name: here, devices: [{DEVICE}]}}]",
)

BEGUN_AGAIN = [
    Point(config="1-2", kind="killed", phase="drain", rank=1, place="update", epoch=1, count=5,
          pipeline=ONE_F_ONE_B),
    Point(config="2-1", kind="killed", phase="steady", rank=2, place="forward", epoch=1, count=2,
          pipeline=GPIPE),
    # Its second use of a weight is the second run of a layer.
    Point(config="1-1", kind="killed", phase="steady", rank=1, place="forward", epoch=2, count=6,
          pipeline=ONE_F_ONE_B),
]  # fmt: skip
STANDS_STILL = Point(
    config="2-1", kind="stopped", phase="steady", rank=0, place="forward", epoch=1, count=1,
    pipeline=GPIPE,
)  # fmt: skip


def assert_begins_again(shell: Shell, undisturbed: Callable[[Point], Path], point: Point) -> Path:
    expected = undisturbed(point)
    again = shell(*point.settings, "parallel.max_restarts=1", timeout_s=420)
    assert (shell.cwd / "injected").exists(), "the fault did not come about"
    assert f"rank {point.rank} (stage {point.stage})" in again.err
    assert "restart 1 of 1" in again.err
    assert_same(again.run, expected)
    return again.run


@pytest.mark.parametrize("point", BEGUN_AGAIN, ids=lambda point: point.id)
def test_ranks_of_a_synchronous_pipeline_begin_again(
    shell: Shell, undisturbed: Callable[[Point], Path], point: Point
) -> None:
    assert_begins_again(shell, undisturbed, point)


def test_a_rank_that_stands_still_ends_all_and_the_run_goes_on(
    shell: Shell, undisturbed: Callable[[Point], Path]
) -> None:
    fails_in_time(shell, STANDS_STILL)
    run = shell(*STANDS_STILL.settings, timeout_s=180).run
    assert_same(run, undisturbed(STANDS_STILL))


def test_layers_that_were_chosen_stay_chosen(
    shell: Shell, undisturbed: Callable[[Point], Path]
) -> None:
    point = Point(
        config="1-1", kind="killed", phase="drain", rank=0, place="update", epoch=1, count=3,
        pipeline=(*CHOSEN, given(shell.cwd)),
    )  # fmt: skip
    run = assert_begins_again(shell, undisturbed, point)
    assert read_json(run / "result.json")["recomputed_layers"] == [[0, 0], [3, 3]]
