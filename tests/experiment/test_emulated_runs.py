"""Real emulated trainings through the command line, and that nothing of killed ones stays."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from emulated_cases import (
    ACTIVATION_BYTES,
    BACKWARD_S,
    FORWARD_S,
    LAYERS,
    PARAMETER_BYTES,
    hosts,
)
from experiment_harness import Shell, fault, orphans, wait_for
from namespace_cases import left, needs_namespaces

from sparsepipe.errors import TransportError
from sparsepipe.results.files import read_json

COMPUTE_S = LAYERS * (FORWARD_S + BACKWARD_S)  # of the fast device; the slow ones take twice that
PIPELINE = ("parallel=pipeline", "parallel.plan.config=1-2", "parallel.plan.cuts=[2]")


@pytest.mark.full
@needs_namespaces
def test_a_pipeline_over_two_hosts(shell: Shell) -> None:
    """It goes as fast as its slowest part at most: here the link, by the bytes of a cut."""
    rate = 4e6
    run = shell(*hosts(shell.cwd, bytes_per_s=rate), *PIPELINE, "hardware.time_scale=2").run
    result = read_json(run / "result.json")
    assert (result["kind"], result["network"]) == ("emulated", "namespaces")
    assert (result["time_scale"], result["minibatches"], result["ranks"]) == (2, 24, 3)
    assert (result["plan_config"], result["plan_cuts"]) == ("1-2", [2])
    fastest = rate / ACTIVATION_BYTES
    assert fastest < 2 / COMPUTE_S, "the first stage alone is faster"
    assert 0 < result["minibatches_per_s"] < 1.1 * fastest, "but for the bucket"
    assert result["samples_per_s"] == pytest.approx(16 * result["minibatches_per_s"])
    assert 0 < result["epoch_minibatches_per_s"] < result["minibatches_per_s"] * 1.1
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "plan.json", "result.json", "DONE.json"
    }  # fmt: skip


@pytest.mark.full
def test_data_parallelism_on_loopback(shell: Shell) -> None:
    """Every step takes as long as the slowest device computes, at least."""
    run = shell(
        *hosts(shell.cwd),
        "parallel=dp",
        "hardware.network=loopback",
        "trainer.limit_train_batches=8",
    ).run
    result = read_json(run / "result.json")
    assert (result["kind"], result["network"], result["minibatches"]) == (
        "emulated",
        "loopback",
        24,
    )
    assert 0 < result["minibatches_per_s"] < 3 / (2 * COMPUTE_S)
    assert result["epoch_s"] > 8 * 2 * COMPUTE_S


@pytest.mark.full
def test_the_task_counts_minibatches_over_all_ranks(shell: Shell) -> None:
    *here, _ = hosts(shell.cwd)
    asked = ("task=emulate", "task.network=loopback", "task.minibatches=20", "task.time_scale=0.5")
    result = read_json(shell(*here, "parallel=dp", *asked).run / "result.json")
    assert (result["minibatches"], result["time_scale"]) == (21, 0.5)
    assert result["link_bytes_per_s"] == 20e6


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
    assert result["minibatches_per_s"] < 1.1 * 3 / step_s


@pytest.mark.full
def test_a_searched_plan(shell: Shell) -> None:
    overrides = (*hosts(shell.cwd), "hardware.network=loopback")
    run = shell(*overrides, "parallel=exact", "parallel.search.cost_model=eq4").run
    result = read_json(run / "result.json")
    assert result["plan_strategy"] == "exact"
    assert result["plan_samples_per_s"] == pytest.approx(16 / result["plan_bottleneck_s"])
    assert "plan_shapes_per_s" not in result


@needs_namespaces
@pytest.mark.full
def test_a_signal_leaves_nothing(shell: Shell) -> None:
    overrides = hosts(shell.cwd)
    process = shell.start(*overrides, *PIPELINE, "trainer.limit_train_batches=2000")
    wait_for(lambda: bool(list(shell.cwd.glob("outputs/*/*/plan.json"))))
    assert left(process.pid)
    process.send_signal(signal.SIGTERM)
    ended = shell.wait(process)
    assert ended.code == 128 + signal.SIGTERM, ended.err
    assert "stopped by SIGTERM" in ended.err
    assert left(process.pid) == []


@needs_namespaces
@pytest.mark.full
def test_a_rank_that_fails_leaves_nothing(shell: Shell) -> None:
    plan = fault([(3, signal.SIGKILL)], rank=1)
    process = shell.start(*hosts(shell.cwd), *PIPELINE, plan)
    ended = shell.wait(process)
    # Told by the launcher or by the rank that missed it, whoever is first.
    how = {1: "was killed by SIGKILL", TransportError.exit_code: "is gone"}
    assert f"rank 1 (stage 1) {how[ended.code]}" in ended.err
    assert left(process.pid) == []


@needs_namespaces
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_twenty_runs_of_which_five_are_killed_leave_nothing(shell: Shell) -> None:
    draw = random.Random(7)
    killed_runs = set(draw.sample(range(19), 5))  # the last start removes what others left
    killed: list[int] = []
    for number in range(20):
        overrides = (*hosts(shell.cwd), *PIPELINE, f"seed={number}")
        process = shell.start(*overrides)
        if number in killed_runs:
            wait_for(lambda pid=process.pid: bool(left(pid)))  # made, or about to be
            time.sleep(8 * draw.random() ** 2)  # while hosts are made, ranks start or train
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
            killed.append(process.pid)
            continue
        ended = shell.wait(process)
        assert ended.code == 0, ended.err
        assert read_json(ended.run / "result.json")["network"] == "namespaces"
        assert [name for pid in (*killed, process.pid) for name in left(pid)] == []
    assert len(killed) == 5
    assert orphans(shell.cwd) == []
