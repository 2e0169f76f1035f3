"""Real emulated trainings through the command line: what they tell, begin again, and leave."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, fault, orphans, wait_for
from tests.support.emulated_cases import (
    ACTIVATION_BYTES,
    BACKWARD_S,
    FORWARD_S,
    LAYERS,
    PARAMETER_BYTES,
    hosts,
    profile,
)
from tests.support.namespace_cases import PERMITTED, left, needs_namespaces

COMPUTE_S = LAYERS * (FORWARD_S + BACKWARD_S)  # of the fast device; the slow ones take twice that
PIPELINE = ("parallel=pipeline", "parallel.plan.config=1-2", "parallel.plan.cuts=[2]")
ENDLESS = "trainer.limit_train_batches=2000"
"""As good as: for runs that are ended from outside."""


@pytest.mark.full
@needs_namespaces
def test_a_pipeline_over_two_hosts(shell: Shell) -> None:
    """It takes as long as its slowest part at least: here the link, by the bytes of a cut."""
    rate = 4e6
    run = shell(*hosts(shell.cwd, bytes_per_s=rate), *PIPELINE, "hardware.time_scale=2").run
    result = read_json(run / "result.json")
    assert (result["kind"], result["network"]) == ("emulated", "namespaces")
    assert (result["time_scale"], result["minibatches"], result["ranks"]) == (2, 24, 3)
    assert (result["plan_config"], result["plan_cuts"]) == ("1-2", [2])
    crossing_s = ACTIVATION_BYTES / rate
    assert crossing_s > COMPUTE_S / 2, "the first stage alone is faster"
    assert result["epoch_s"] > 23 * crossing_s, "but for the bucket"
    assert result["minibatches_per_s"] > 0
    assert result["samples_per_s"] == pytest.approx(16 * result["minibatches_per_s"])
    assert result["epoch_minibatches_per_s"] > 0
    assert {path.name for path in run.iterdir()} == {
        ".starts", "config.yaml", "plan.json", "result.json", "DONE.json"
    }  # fmt: skip


@pytest.mark.full
def test_data_parallelism_on_loopback(shell: Shell) -> None:
    """Every step takes as long as the slowest device computes, at least, in the cluster's time.

    Pauses that were not stretched would take a quarter of that.
    """
    loopback, steps = "hardware.network=loopback", "trainer.limit_train_batches=16"
    run = shell(*hosts(shell.cwd), "parallel=dp", loopback, steps, "hardware.time_scale=4").run
    result = read_json(run / "result.json")
    assert (result["kind"], result["network"]) == ("emulated", "loopback")
    assert (result["time_scale"], result["minibatches"]) == (4, 3 * 16)
    assert result["minibatches_per_s"] > 0
    # The clock is the fast device's, which may have begun later than the slow ones.
    assert result["epoch_s"] > 12 * 2 * COMPUTE_S


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["gpipe", "sync_1f1b", "eager_1f1b"])
def test_a_synchronous_pipeline_on_loopback(shell: Shell, parallel: str) -> None:
    """A step takes as long as the slow stage, and the fast one's way there and back beside it."""
    parts, steps, scale = 4, 8, 4
    plan = (f"parallel={parallel}", "parallel.plan.config=1-1", "parallel.plan.cuts=[2]")
    run = shell(
        *hosts(shell.cwd, slow=1, bytes_per_s=1e9), *plan,
        f"parallel.strategy.microbatches={parts}",
        f"trainer.limit_train_batches={steps}", f"hardware.time_scale={scale}",
        "hardware.network=loopback",
    ).run  # fmt: skip
    result = read_json(run / "result.json")
    assert (result["plan_config"], result["microbatches"]) == ("1-1", parts)
    assert (result["schedule"], result["minibatches"]) == (parallel.removeprefix("sync_"), steps)
    fast_s, slow_s = COMPUTE_S / 2, 2 * COMPUTE_S / 2
    assert result["epoch_s"] > steps * (slow_s + fast_s / parts)


@pytest.mark.full
def test_the_task_counts_minibatches_over_all_ranks(shell: Shell) -> None:
    *here, _ = hosts(shell.cwd)
    asked = ("task=emulate", "task.network=loopback", "task.minibatches=20", "task.time_scale=0.5")
    result = read_json(shell(*here, "parallel=dp", *asked).run / "result.json")
    assert (result["minibatches"], result["time_scale"]) == (21, 0.5)
    assert result["link_bytes_per_s"] == 20e6


@pytest.mark.full
def test_updates_take_as_long_as_in_the_simulation(shell: Shell) -> None:
    """The first stage is the slowest, and rests between minibatches for no less than it says."""
    *here, _ = hosts(shell.cwd)
    update_s = 0.03  # of a layer
    for name, slower in (("fast", 1.0), ("slow", 2.0)):
        profile(slower=slower, update_s=update_s).save(shell.cwd / f"{name}.json")
    stage_s = 2 * (FORWARD_S + BACKWARD_S + update_s)
    simulated = shell(*here, *PIPELINE, "task=simulate", "task.minibatches=24").run
    assert read_json(simulated / "result.json")["minibatch_s"] == pytest.approx(stage_s)
    asked = ("task=emulate", "task.network=loopback", "task.minibatches=24")
    emulated = read_json(shell(*here, *PIPELINE, *asked).run / "result.json")
    assert emulated["minibatches"] == 24
    assert emulated["epoch_s"] > 24 * stage_s - 0.001, "but for a pause that is saved up"


@needs_namespaces
@pytest.mark.full
def test_sums_of_gradients_cross_the_link(shell: Shell) -> None:
    """However ranks add them up, each host must hear of all the other's gradients."""
    rate = 4e6
    run = shell(
        *hosts(shell.cwd, bytes_per_s=rate), "parallel=dp", "trainer.limit_train_batches=8"
    ).run
    result = read_json(run / "result.json")
    step_s = LAYERS * PARAMETER_BYTES / rate
    assert result["epoch_s"] > 7 * step_s, "of the last step some may still be on its way"


def killed_at_random(process: subprocess.Popen[str], draw: random.Random) -> int:
    """Kills a run while hosts are made, ranks start or train; its number."""
    wait_for(lambda: bool(left(process.pid)) or process.poll() is not None)
    time.sleep(8 * draw.random() ** 2)
    process.kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, said
    return process.pid


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_eight_runs_of_which_three_are_killed_leave_nothing(shell: Shell) -> None:
    draw = random.Random(7)
    killed_runs = set(draw.sample(range(7), 3))  # the last start removes what others left
    killed: list[int] = []
    for number in range(8):
        overrides = (*hosts(shell.cwd), *PIPELINE, f"seed={number}")
        if number in killed_runs:
            killed.append(killed_at_random(shell.start(*overrides, ENDLESS), draw))
            continue
        process = shell.start(*overrides)
        ended = shell.wait(process)
        assert ended.code == 0, ended.err
        assert read_json(ended.run / "result.json")["network"] == "namespaces"
        assert [name for pid in (*killed, process.pid) for name in left(pid)] == []
    assert len(killed) == 3
    assert orphans(shell.cwd) == []


NETWORK = "namespaces" if PERMITTED else "loopback"
RATE, MINIBATCHES, LIMITED = 4e6, 24, "hosts as network namespaces"


def asked(shell: Shell, *overrides: str) -> list[str]:
    return [
        *hosts(shell.cwd, bytes_per_s=RATE),
        *PIPELINE,
        f"hardware.network={NETWORK}",
        *overrides,
    ]


def check(run: Path, *, starts: int) -> None:
    """The result is that of a whole epoch, at the pace of the link or of the first stage."""
    result: dict[str, Any] = read_json(run / "result.json")
    assert (result["kind"], result["network"]) == ("emulated", NETWORK)
    assert (result["minibatches"], result["starts"], result["ranks"]) == (MINIBATCHES, starts, 3)
    computing_s, crossing_s = 2 * (FORWARD_S + BACKWARD_S), ACTIVATION_BYTES / RATE
    slowest_s = crossing_s if PERMITTED else computing_s
    assert slowest_s >= computing_s
    assert result["epoch_s"] > (MINIBATCHES - 1) * slowest_s
    assert (run / "DONE.json").exists()


@pytest.mark.full
def test_ranks_begin_again_on_the_same_hosts(shell: Shell) -> None:
    killed = fault([(3, signal.SIGKILL)], rank=1)
    process = shell.start(*asked(shell, killed, "parallel.max_restarts=1"))
    ended = shell.wait(process)
    assert (shell.cwd / "fault-at-3").exists(), "it did not come about"
    assert "rank 1 (stage 1)" in ended.err
    assert "restart 1 of 1" in ended.err
    assert ended.err.count(LIMITED) == PERMITTED, "they are made once"
    check(ended.run, starts=1)
    assert left(process.pid) == []


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_the_same_command_begins_again(shell: Shell, signum: signal.Signals) -> None:
    """What is left of hosts when the command is killed goes when it is given again."""
    command = asked(shell, fault([(3, signum)], parent=True))
    process = shell.start(*command)
    first = shell.wait(process)
    assert (shell.cwd / "fault-at-3").exists(), "it did not come about"
    died = signum is signal.SIGKILL
    assert first.code == (-signum if died else 128 + signum), first.err
    assert bool(left(process.pid)) == (died and PERMITTED)
    begun = shell.runs()  # an epoch that was stopped leaves nothing worth a directory
    assert len(begun) == died
    assert not any((run / "DONE.json").exists() for run in begun)
    again = shell(*command)
    assert shell.runs() == [again.run]
    check(again.run, starts=1 + died)
    assert left(process.pid) == []
    assert ("removing leftovers of an emulated cluster" in again.err) == (died and PERMITTED)
