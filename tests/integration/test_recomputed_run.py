"""Trainings and simulations that recompute activations, through the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsepipe.schedule import Plan
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint
from tests.support.emulated_cases import BACKWARD_S, FORWARD_S, hosts
from tests.support.planned_cases import SLOW
from tests.support.recompute_cases import AUTO, given
from tests.support.simulated_cases import BY_HAND, result, run


@pytest.mark.full
def test_a_simulation_counts_the_longer_backwards(tmp_path: Path) -> None:
    own = [word.replace("parallel=pipeline", "parallel=gpipe") for word in BY_HAND]
    plain = result(run(tmp_path, *own))
    done = run(tmp_path, *own, "parallel.strategy.recompute={stages: [1]}")
    whole = run(tmp_path, *own, "parallel.strategy.recompute=all")
    assert "recomputed_layers" not in plain
    assert result(done)["recomputed_layers"] == [[24, 51]]
    assert result(whole)["recomputed_layers"] == [[0, 23], [24, 51]]
    assert Plan.from_json(whole.plan.read_text()).details["recomputed"] == [[0, 23], [24, 51]]
    times_s = [found["minibatch_s"] for found in (plain, result(done), result(whole))]
    assert times_s[0] < times_s[1] < times_s[2] < 1.5 * times_s[0]
    assert result(whole)["device_peak_bytes"] < plain["device_peak_bytes"]
    stale = result(run(tmp_path, *own, "parallel.strategy.recompute=all",
                       "task.schedule=asynchronous"))  # fmt: skip
    assert "recomputed_layers" not in stale, "which does not recompute"
    assert stale["minibatch_s"] == result(run(tmp_path, *BY_HAND))["minibatch_s"]


@pytest.mark.full
def test_a_result_has_the_recomputed_layers(shell: Shell) -> None:
    settings = ("parallel=gpipe", "hardware=cores", "parallel.devices=2", "model.dropout=0.5",
                "parallel.plan.balance=layers", "parallel.strategy.microbatches=3")  # fmt: skip
    plain = shell(*settings)
    done = shell(*settings, "parallel.strategy.recompute=all")
    assert done.run != plain.run
    found = read_json(done.run / "result.json")
    (cut,) = found["plan_cuts"]
    plan = Plan.from_json((done.run / "plan.json").read_text())
    spans = [[0, cut - 1], [cut, plan.num_layers - 1]]
    assert found["recomputed_layers"] == plan.details["recomputed"] == spans
    assert f", recomputing layers 0-{cut - 1}, {cut}-{plan.num_layers - 1})" in done.err
    assert "recomputed_layers" not in read_json(plain.run / "result.json")
    ours, theirs = (checkpoint(each.run)["state_dict"] for each in (done, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.full
def test_a_run_recomputes_what_would_not_fit(shell: Shell) -> None:
    device = "{name: core, count: 2, accelerator: cpu, memory_bytes: 1400000}"
    done = shell(
        "model.width=64", "data.batch_size=4", "hardware=cores",
        f"hardware.value.hosts=[{{name: here, devices: [{device}]}}]",
        "parallel=gpipe", "parallel.search.search=hete_mp", SLOW, AUTO, given(shell.cwd),
    )  # fmt: skip
    found = read_json(done.run / "result.json")
    assert (found["plan_config"], found["plan_cuts"]) == ("1-1", [2])
    assert found["recomputed_layers"] == [[0, 0], [3, 3]]
    assert "plan_strategy" in found, "the search has told of itself"
    # Of each stage 9 s without, and a second run of 1 s.
    assert found["plan_bottleneck_s"] == pytest.approx(10.0)
    assert found["plan_shapes_per_s"] == pytest.approx(4 / 10.0)
    assert "stage 1 recomputes layers 3: " in done.err
    assert ", recomputing layers 0, 3)" in done.err
    again = shell(
        "model.width=64", "data.batch_size=4", "hardware=cores", "parallel=gpipe",
        f"hardware.value.hosts=[{{name: here, devices: [{device}]}}]",
        f"parallel.plan.file={done.run / 'plan.json'}",
    )  # fmt: skip
    assert again.run != done.run
    told = read_json(again.run / "result.json")
    assert told["recomputed_layers"] == [[0, 0], [3, 3]], "as the plan file says"
    assert told["plan_bottleneck_s"] == pytest.approx(10.0)


@pytest.mark.full
def test_emulated_layers_take_the_time_of_their_second_run(shell: Shell) -> None:
    """A step takes no less than the slow stage with a forward more, and the fast one's way there.

    What it takes without messages, and no more: tests/unit/emulate/test_replay.py.
    """
    parts, steps = 4, 6
    done = shell(
        *hosts(shell.cwd, slow=1, bytes_per_s=1e9), "parallel=gpipe", "parallel.plan.config=1-1",
        "parallel.plan.cuts=[2]", f"parallel.strategy.microbatches={parts}",
        "parallel.strategy.recompute=all", f"trainer.limit_train_batches={steps}",
        "hardware.time_scale=4", "hardware.network=loopback",
    )  # fmt: skip
    found = read_json(done.run / "result.json")
    assert found["recomputed_layers"] == [[0, 1], [2, 3]]
    layer_s = 2 * FORWARD_S + BACKWARD_S
    slow_s, fast_s = 2 * 2 * layer_s, 2 * layer_s
    assert found["epoch_s"] > steps * (slow_s + fast_s / parts)
