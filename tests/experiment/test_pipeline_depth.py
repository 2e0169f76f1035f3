"""The study of depth: its jobs, and that they come into its table."""

from __future__ import annotations

import json
import shlex
from itertools import dropwhile
from pathlib import Path

import numpy as np
import pytest
from emulated_cases import profile
from experiment_harness import composed
from test_report_commands import jobs_of

from sparsepipe.experiment.asked_emulation import as_emulated
from sparsepipe.experiment.build import build_inventory
from sparsepipe.experiment.emulated import emulated_profiles, parallel
from sparsepipe.experiment.job import run_job
from sparsepipe.experiment.kept_memory import kept_bytes
from sparsepipe.experiment.rundir import identity_of
from sparsepipe.experiment.schedules import Synchronous
from sparsepipe.experiment.usual import usual
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.results.report.commands import Commands
from sparsepipe.results.report.pipeline_depth import PIPELINE_DEPTH
from sparsepipe.schedule import Plan

NAME = "experiment=pipeline_depth"


def trial(name: str, *more: str) -> dict:
    return composed(NAME, f"trial=pipeline_depth/{name}", *more)


def test_every_cell_is_a_job_of_the_sweep_and_every_job_a_cell() -> None:
    (block,) = PIPELINE_DEPTH.blocks([], Commands(experiment="pipeline_depth", usual=usual))
    swept = jobs_of(shlex.split(block.sweep)[1:])
    words = [shlex.split(cell.command) for cell in block.cells if cell.command]
    bare = [list(dropwhile(lambda word: "=" in word, each))[1:] for each in words]
    alone = {frozenset(each) for each in bare}
    # Serial runs are the same with any partition.
    serial = {job for job in swept if any("serial" in word for word in job)}
    assert len(swept) == 22
    assert {job - {"partition=variance", "partition=straight"} for job in serial} | (
        swept - serial
    ) == alone


@pytest.mark.parametrize("name", ["serial", "serial_emulated"])
def test_serial_runs_do_not_depend_on_the_partition(name: str) -> None:
    one, other = (trial(name, f"partition={each}") for each in ("variance", "straight"))
    assert identity_of(one) == identity_of(other)
    assert "partition" not in one
    assert "depth" not in one


@pytest.mark.parametrize("schedule", ["gpipe", "sync_1f1b", "asynchronous"])
@pytest.mark.parametrize("partition", ["variance", "straight"])
def test_depths_and_partitions_are_those_that_are_asked_for(schedule: str, partition: str) -> None:
    asked = f"partition={partition}"
    two = trial(f"{schedule}_2", asked)
    assert two["parallel"]["search"]["search"] == partition
    assert not two["hardware"].get("emulate")
    assert build_inventory(two).num_devices == 2
    for depth in (4, 8):
        config = dict(as_emulated(trial(f"{schedule}_{depth}", asked)))
        inventory = build_inventory(config)
        assert parallel(config, inventory)["devices"] == inventory.num_devices == depth
        assert config["parallel"]["search"]["search"] == partition
        parts = config["parallel"]["strategy"].get("microbatches")
        assert parts == (None if schedule == "asynchronous" else 32)
    assert two["data"]["batch_size"] == 512


def test_the_profile_is_of_the_network_and_the_batch() -> None:
    config = dict(as_emulated(trial("gpipe_8")))
    (found,) = emulated_profiles(config, build_inventory(config)).values()
    assert found.num_layers == 49
    assert found.meta["batch_size"] == config["data"]["batch_size"]
    assert found.meta["threads"] == 1


def test_a_profile_of_layers_that_are_alike_goes_with_the_same_trials() -> None:
    profiles = "parallel.search.profiles={core: profiles/pipeline_depth/alike.json}"
    config = dict(as_emulated(trial("gpipe_8", profiles)))
    (found,) = emulated_profiles(config, build_inventory(config)).values()
    assert len({(layer.forward_s, layer.backward_s) for layer in found.layers}) == 1
    assert found.num_layers % 8 == 0


def kept(config: str, cuts: tuple[int, ...], synchronous: Synchronous | None) -> list[float]:
    one = profile()
    layers = [
        {**{key: getattr(layer, key) for key in layer.__dataclass_fields__}, "saved_bytes": 800.0,
         "begin_bytes": 100.0, "end_bytes": 0.0}
        for layer in one.layers
    ]  # fmt: skip
    counted = type(one)(layers=tuple(type(one.layers[0])(**each) for each in layers))
    plan = Plan.of(config=config, cuts=cuts, num_layers=4)
    model = MemoryModel(stash=synchronous is None, optimizer=1.0, gradients=0.0)
    names = {device: counted for stage in plan.stages for device in stage.devices}
    return kept_bytes(plan, names, model, synchronous)


def test_kept_memory_by_hand() -> None:
    """Four layers that save 800 bytes each of a minibatch, parameters and momentum of 400,000."""
    weights = 2 * 400_000
    assert kept("1", (), None) == [4 * weights + 4 * 800 + 100]
    half = 2 * 800 + 100
    assert kept("1-1", (2,), Synchronous("gpipe", 4)) == [2 * weights + half] * 2
    # One microbatch more than stages follow, a quarter of the minibatch each.
    by_turns = [2 * weights + 2 * half / 4, 2 * weights + half / 4]
    assert kept("1-1", (2,), Synchronous("1f1b", 4)) == pytest.approx(by_turns)
    # Two minibatches, with a version of the weights of its own each.
    stashed = [2 * weights + 2 * 400_000 + 2 * half, 2 * weights + half]
    assert kept("1-1", (2,), None) == pytest.approx(stashed)


@pytest.mark.full
@pytest.mark.usefixtures("workplace")
def test_a_small_study_ends_in_its_table(tmp_path: Path) -> None:
    """Two stages for real and four emulated, of a small network and few images."""
    small = (
        "data.source.train_images=64", "data.source.test_images=10", "data.batch_size=16",
        "model.convolutions=6", "model.width=0.125", "trainer.max_epochs=1",
        "trainer.limit_train_batches=4",
    )  # fmt: skip
    measuring = tuple(
        f"parallel.search.measure.{name}=1" for name in ("num_warmup", "num_measured")
    )
    directory = run_job(
        trial("gpipe_2", *small, *measuring, "parallel.strategy.microbatches=4"),
        fresh_processes=True,
    )
    told = json.loads(directory.result.read_text())
    assert told["plan_config"] == "1-1"
    assert 0 < told["bubble_share_of_busiest"] <= told["bubble_share"] < 1
    assert told["kept_bytes"] > told["kept_bytes_of_device"] > 0
    path = tmp_path / "profile.json"
    profile().save(path)
    emulated = run_job(
        trial(
            "sync_1f1b_4",
            "model=mlp",
            f"parallel.search.profiles={{core: {path}}}",
            "parallel.strategy.microbatches=8",
            "trainer.limit_train_batches=6",
        )
    )
    told = json.loads(emulated.result.read_text())
    assert told["kind"] == "emulated"
    assert np.isfinite(told["samples_per_s"])
    assert 0 < told["bubble_share"] < 1
