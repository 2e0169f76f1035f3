"""Pipelines through the command line: what runs, recomputes, is told of it, and stops."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sparsepipe.schedule import Plan
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, checkpoint, fault, rows
from tests.support.emulated_cases import BACKWARD_S, FORWARD_S, hosts
from tests.support.planned_cases import SLOW
from tests.support.recompute_cases import AUTO, given
from tests.support.simulated_cases import BY_HAND, result, run

Job = Callable[..., Path]
SPLIT = ("parallel=pipeline", "hardware=cores", "parallel.devices=2")


@pytest.mark.full
def test_model_parallel_run(shell: Shell, job: Job) -> None:
    done = shell(*SPLIT, "model.norm=true", "parallel.plan.balance=layers")
    result = read_json(done.run / "result.json")
    assert (result["ranks"], result["plan_config"], result["plan_cuts"]) == (2, "1-1", [3])
    assert result["steps"] == 16
    assert Plan.from_json((done.run / "plan.json").read_text()).cuts == (3,)
    (line,) = [line for line in done.err.splitlines() if "layers" in line]
    assert "mlp: 5 layers, 106 parameters, 2 classes" in line  # of the whole network
    assert "2 processes on cpu (core), as a pipeline 1-1 cut at layer 3 (stash)" in line
    assert "samples: 32 to train on, 8 to validate, 9 to test" in line
    alone = ("parallel=single", "model.norm=true", f"checkpoint={done.run}")
    evaluated = read_json(job("task=evaluate", *alone) / "result.json")
    for name in ("test/accuracy", "test/loss", "test/accuracy/up"):
        assert result[name] == pytest.approx(evaluated[name], rel=1e-6)
    assert shapes_trained_on(done.run) == pytest.approx([32, 32], rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["gpipe", "sync_1f1b", "eager_1f1b"])
def test_synchronous_run(shell: Shell, job: Job, parallel: str) -> None:
    """Its curves and its weights are those of one device."""
    settings = ("hardware=cores", "parallel.devices=2", "parallel.plan.balance=layers")
    done = shell(f"parallel={parallel}", *settings, "parallel.strategy.microbatches=3")
    result = read_json(done.run / "result.json")
    assert (result["ranks"], result["plan_config"], result["strategy"]) == (2, "1-1", parallel)
    schedule = parallel.removeprefix("sync_")
    assert (result["schedule"], result["microbatches"]) == (schedule, 3)
    assert f"as a pipeline 1-1 cut at layer {result['plan_cuts'][0]} ({schedule}, 3" in done.err
    assert (done.run / "timeline.png").exists()
    alone = job("parallel=single")
    for ours, theirs in zip(rows(done.run), rows(alone), strict=True):
        for name in ("train/loss", "val/loss", "val/accuracy"):
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-5)
    ours, theirs = (checkpoint(run)["state_dict"] for run in (done.run, alone))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parallel", ["pipeline", pytest.param("gpipe", marks=pytest.mark.full)])
def test_a_trace_of_what_ranks_really_did(shell: Shell, parallel: str) -> None:
    """Each minibatch in the order of the pipeline, no rank doing two things at once, and all of its
    time by name.
    """
    parts = 2 if parallel == "gpipe" else 1
    more = ("parallel.strategy.microbatches=2",) if parts > 1 else ()
    split = ("parallel.plan.config=2-1", "hardware=cores", "parallel.plan.balance=layers")
    done = shell(f"parallel={parallel}", *split, *more, "trainer.trace=true")
    written = check_trace(done.run, config="2-1")
    recorded = {name for names in written.values() for name in names}
    minibatches = {name[1:].partition(".")[0] for name in recorded if name[0] == "F"}
    # 3 minibatches for each rank in an asynchronous pipeline, in whole rounds, else 3 in all.
    assert len(minibatches) >= (3 if parts > 1 else 10)
    lines = [line for line in done.err.splitlines() if " ms per minibatch: " in line]
    assert len(lines) == len(written)
    for line in lines:
        assert re.search(r": forwards \d.*, backwards \d.*, else \d.*; in \d+% of its ", line), line


def check_trace(run: Path, *, config: str) -> dict[int, set[str]]:
    """Actions of each rank in a trace, whose order and parts are checked."""
    assert (run / "timeline_measured.png").exists()
    written = read_json(run / "trace.json")
    assert written["otherData"] == {"kind": "measured", "config": config}
    slices = [event for event in written["traceEvents"] if event["ph"] == "X"]
    plan = Plan.from_json((run / "plan.json").read_text())
    begin_us: dict[tuple[int, str], float] = {}
    end_us: dict[tuple[int, str], float] = {}
    found: dict[int, set[str]] = {}
    for rank in range(plan.num_ranks):
        for thread in (0, 1):
            own = [event for event in slices if (event["pid"], event["tid"]) == (rank, thread)]
            for before, after in pairwise(own):
                assert before["ts"] + before["dur"] <= after["ts"] + 0.01, (rank, before, after)
        actions = [event for event in slices if (event["pid"], event["tid"]) == (rank, 0)]
        found[rank] = {event["name"] for event in actions}
        assert len(actions) == len(found[rank])
        begin_us |= {(rank, event["name"]): event["ts"] for event in actions}
        end_us |= {(rank, event["name"]): event["ts"] + event["dur"] for event in actions}
        beside = {event["name"] for event in slices if (event["pid"], event["tid"]) == (rank, 1)}
        assert {"loads", "waits", "sums", "hooks", "logs"} <= beside
    last = plan.ranks_of(plan.num_stages - 1)
    for rank in plan.ranks_of(0):
        for name in (name[1:] for name in found[rank] if name[0] == "F"):
            for end in last:
                if {f"F{name}", f"B{name}"} <= found[end] and f"B{name}" in found[rank]:
                    assert end_us[rank, f"F{name}"] <= begin_us[end, f"F{name}"]
                    assert end_us[end, f"F{name}"] <= begin_us[end, f"B{name}"]
                    assert end_us[end, f"B{name}"] <= begin_us[rank, f"B{name}"]
    return found


def shapes_trained_on(run: Path) -> list[float]:
    """In each epoch."""
    return [float(row["train/shapes_per_s"]) * float(row["time/epoch_s"]) for row in rows(run)]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallel", ["pipeline", "gpipe"])
def test_interrupted_within_an_epoch(shell: Shell, parallel: str) -> None:
    """All ranks stop after the same step, some steps later; the rest of the epoch follows."""
    settings = (
        f"parallel={parallel}",
        "parallel.plan.config=2-1",
        "hardware=cores",
        "trainer.max_epochs=2",
        "data.train_size=320",
        "data.delay_s=0.01",
        "trainer.trace=true",
        "optim.optimizer.lr=0.0",  # a stop drains the pipeline, whose weights are no others then
    )
    expected = shell(*settings, "name=undisturbed").run
    settings = (*settings, fault([(4, signal.SIGINT)], parent=True))
    stopped = shell(*settings)
    assert stopped.code == 130, stopped.err
    (run,) = [path for path in shell.runs() if path.parent != expected.parent]
    place = checkpoint(run)["callbacks"]["RunCheckpoint"]
    assert place["epoch"] == 0
    assert 4 < place["batches"] < 40
    again = shell(*settings)
    assert again.run == run
    assert [(row["epoch"], row["step"]) for row in rows(run)] == [("0", "40"), ("1", "80")]
    assert shapes_trained_on(run) == pytest.approx([320, 320], rel=1e-5)
    traced = check_trace(run, config="2-1")[0]  # of the process that goes on
    first = min(int(name[1:].partition(".")[0]) for name in traced if name[0] == "F")
    assert first >= place["batches"]
    for name in ("train/loss", "train/accuracy"):
        values = [[float(row[name]) for row in rows(path)] for path in (run, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-6), name


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["gpipe", "pipeline"])
def test_a_stage_on_a_grid_trains_as_one_on_one_device(shell: Shell, parallel: str) -> None:
    """By plan files that differ in the grid alone; a run of several epochs is continued."""
    images = ("model=cnn2d", "model.width=0.25", "data=images", "data.source.sizes=[24,20]")
    small = ("data.source.train_samples=16", "data.source.test_samples=8", "data.batch_size=4")
    found = {}
    for name, devices, grid in (("plain", ["b"], {}), ("grid", ["b", "c"], {"grid": [1, 2]})):
        file = shell.cwd / f"{name}.json"
        stages = [
            {"layers": [0, 3], "devices": ["a"]},
            {"layers": [4, 11], "devices": devices, **grid},
        ]
        file.write_text(json.dumps({"stages": stages}))
        settings = (*images, *small, f"parallel={parallel}", f"parallel.plan.file={file}")
        settings = (*settings, "hardware.cpu_devices=3", f"name={name}", "trainer.trace=true")
        trained = shell(*settings, "trainer.max_epochs=2")
        found[name] = trained.run
    assert "stage 1 on a grid of 1 x 2" in trained.err
    assert "grid" in (found["grid"] / "plan.json").read_text()
    for ours, theirs in zip(rows(found["grid"]), rows(found["plain"]), strict=True):
        assert float(ours["train/loss"]) == pytest.approx(float(theirs["train/loss"]), rel=1e-5)
    ours, theirs = (checkpoint(run)["state_dict"] for run in found.values())
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


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
