"""Ranks of a synchronous pipeline that fail, and runs that stop: they go on as if nothing had."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, fault, rows
from tests.support.fault_cases import TRAINING, Point, assert_same, fails_in_time
from tests.support.recompute_cases import given

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
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


@pytest.mark.parametrize("point", BEGUN_AGAIN, ids=lambda point: point.id)
def test_ranks_begin_again_by_themselves(
    shell: Shell, undisturbed: Callable[[Point], Path], point: Point
) -> None:
    assert_begins_again(shell, undisturbed, point)


def assert_begins_again(shell: Shell, undisturbed: Callable[[Point], Path], point: Point) -> Path:
    expected = undisturbed(point)
    again = shell(*point.settings, "parallel.max_restarts=1", timeout_s=420)
    assert (shell.cwd / "injected").exists(), "the fault did not come about"
    assert f"rank {point.rank} (stage {point.stage})" in again.err
    assert "restart 1 of 1" in again.err
    assert_same(again.run, expected)
    return again.run


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


@pytest.mark.parametrize(
    ("pipeline", "config"), [(GPIPE, "2-1"), (ONE_F_ONE_B, "1-2")], ids=["gpipe", "sync_1f1b"]
)
def test_terminated_within_an_epoch(shell: Shell, pipeline: tuple[str, ...], config: str) -> None:
    """Between steps nothing is under way, so that a stop changes no weights."""
    readers = int(config[0])
    settings = (
        *pipeline, f"parallel.plan.config={config}", "trainer.max_epochs=2",
        f"data.train_size={160 * readers}", "data.delay_s=0.01",
    )  # fmt: skip
    expected = shell(*settings, "name=undisturbed").run
    settings = (*settings, fault([(4, signal.SIGTERM)], parent=True))
    stopped = shell(*settings)
    assert stopped.code == 128 + signal.SIGTERM, stopped.err
    (run,) = [path for path in shell.runs() if path.parent != expected.parent]
    place = checkpoint(run)["callbacks"]["RunCheckpoint"]
    assert place["epoch"] == 0
    assert 4 < place["batches"] < 40
    again = shell(*settings)
    assert again.run == run
    assert [(row["epoch"], row["step"]) for row in rows(run)] == [("0", "40"), ("1", "80")]
    ours, theirs = (checkpoint(path) for path in (run, expected))
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, value in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], value), name
    assert [row["val/loss"] for row in rows(run)] == [row["val/loss"] for row in rows(expected)]
    for name in ("train/loss", "train/accuracy"):
        values = [[float(row[name]) for row in rows(path)] for path in (run, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-6), name
