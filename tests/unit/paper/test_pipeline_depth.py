"""The study of depth: its jobs, and that they come into its table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Synchronous
from sparsepipe.launch.job import run_job
from sparsepipe.partition.memory import MemoryModel
from sparsepipe.profiling import Profile
from sparsepipe.schedule import Plan
from sparsepipe.schedule.plan import balanced
from sparsepipe.tasks.emulate import as_emulated, emulated_profiles
from sparsepipe.tasks.result import kept_bytes
from sparsepipe.tasks.task import task_of
from tests.support.command_line import composed
from tests.support.emulated_cases import profile
from tests.support.reported_cells import cells

NAME = "experiment=pipeline_depth"
ALIKE = "parallel.search.profiles={core: profiles/pipeline_depth/alike.json}"


def chosen(schedule: str, depth: int) -> tuple[str, str]:
    """The options of a row's two groups."""
    kind = "measured" if depth == 2 else "emulated"
    return f"paper/schedule={schedule}", f"paper/depth={kind}_{depth}"


def row(schedule: str, depth: int, *more: str) -> RunSpec:
    return composed(NAME, *chosen(schedule, depth), *more)


@pytest.mark.parametrize("depth", [2, 4])
def test_serial_runs_do_not_depend_on_the_partition(depth: int) -> None:
    one, other = (
        row("serial", depth, f"paper.partition={each}") for each in ("variance", "straight")
    )
    assert one.identity() == other.identity()
    assert "paper" not in one.to_dict()


def test_the_emulated_serial_run_does_not_depend_on_the_depth() -> None:
    four, eight = (row("serial", depth) for depth in (4, 8))
    assert four.to_dict() == eight.to_dict()
    assert build_inventory(as_emulated(eight)).num_devices == 1
    assert (eight.hardware.get("time_scale"), eight.trainer.limit_train_batches) == (1.0, 12)


@pytest.mark.parametrize("schedule", ["gpipe", "sync_1f1b", "eager_1f1b", "asynchronous"])
@pytest.mark.parametrize("partition", ["variance", "straight"])
def test_depths_and_partitions_are_those_of_the_command(schedule: str, partition: str) -> None:
    asked = f"paper.partition={partition}"
    two = row(schedule, 2, asked)
    assert two.parallel.search.search == partition
    assert not two.hardware.get("emulate")
    assert build_inventory(two).num_devices == 2
    assert two.trainer.limit_train_batches == 24
    for depth, batches in ((4, 12), (8, 24)):
        config = as_emulated(row(schedule, depth, asked))
        inventory = build_inventory(config)
        assert (
            task_of(config).configured(config, inventory).parallel.devices
            == inventory.num_devices
            == depth
        )
        assert config.parallel.search.search == partition
        parts = config.parallel.strategy.get("microbatches")
        assert parts == (None if schedule == "asynchronous" else 32)
        assert config.hardware.get("time_scale") == 10.0
        assert config.trainer.limit_train_batches == batches
    assert two.data.get("batch_size") == 1024


def test_the_profile_is_of_the_network_and_the_batch() -> None:
    config = as_emulated(row("gpipe", 8))
    (found,) = emulated_profiles(config, build_inventory(config)).values()
    convolutions = config.model.get("convolutions")
    assert found.meta["model_settings"]["convolutions"] == convolutions
    assert found.num_layers == 2 * convolutions + 5
    assert found.meta["batch_size"] == config.data.get("batch_size")
    assert found.meta["threads"] == 1


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_stages_can_have_nearly_equal_shares_of_the_profile(stages: int) -> None:
    config = as_emulated(row("gpipe", 8))
    (found,) = emulated_profiles(config, build_inventory(config)).values()
    costs = [layer.forward_s + layer.backward_s for layer in found.layers]
    bounds = [0, *balanced(costs, [1] * stages), len(costs)]
    slowest = max(sum(costs[a:b]) for a, b in pairwise(bounds))
    assert slowest < 1.1 * sum(costs) / stages


def saving() -> Profile:
    """Four layers that save 800 bytes each of a minibatch."""
    layers = [replace(layer, saved_bytes=800.0, begin_bytes=100.0, end_bytes=0.0)
              for layer in profile().layers]  # fmt: skip
    return Profile(layers=tuple(layers))


def kept(config: str, cuts: tuple[int, ...], synchronous: Synchronous | None) -> list[float]:
    counted = saving()
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


SMALL = (
    "data.source.train_images=96", "data.source.test_images=10", "data.batch_size=16",
    "model.convolutions=6", "model.width=0.125", "trainer.max_epochs=2",
    "trainer.limit_train_batches=6",
)  # fmt: skip
PARTS = "parallel.strategy.microbatches=4"


def small_study(tmp_path: Path) -> dict[tuple[str, int], dict]:
    """Results of two stages for real and four emulated, with their serial runs, by their rows."""
    path = tmp_path / "profile.json"
    replace(saving(), meta={"model": "cnn_5x5", "batch_size": 16}).save(path)
    device = f"name: core, accelerator: cpu, profile: {{cnn_5x5: {path}}}"
    host = "name: server, link: {bytes_per_s: 1e10}, devices: "
    one, four = (
        f"hardware.value.hosts=[{{{host}[{{{device}, count: {count}}}]}}]" for count in (1, 4)
    )
    quick = [f"parallel.search.measure.{name}=1" for name in ("num_warmup", "num_measured")]
    jobs: dict[tuple[str, int], Sequence[str]] = {
        ("serial", 2): (),
        ("gpipe", 2): (*quick, PARTS),
        ("serial", 4): (one,),
        ("sync_1f1b", 4): (four, PARTS),
        ("asynchronous", 4): (four, "trainer.limit_train_batches=12"),
    }
    found = {}
    for (schedule, depth), more in jobs.items():
        directory = run_job(row(schedule, depth, *SMALL, *more), fresh_processes=True)
        found[schedule, depth] = json.loads(directory.result.read_text())
    return found


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("workplace")
def test_a_small_study_ends_in_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    told = small_study(tmp_path)
    report = run_job(composed("task=report", NAME))
    table = cells(report.path / "pipeline_depth.csv", "stages", "obtained", "schedule", "partition")

    def ours(*place: str) -> float:
        return float(table[place]["ours"])

    two, four = ("2", "measured", "GPipe", "ours"), ("4", "emulated", "1F1B", "ours")
    serial, gpipe = (told[name]["train_shapes_per_s"] for name in (("serial", 2), ("gpipe", 2)))
    assert ours("1", "measured", "serial", "-", "time") == pytest.approx(42_000 / serial / 60)
    assert ours(*two, "speedup") == pytest.approx(gpipe / serial)
    assert ours(*two, "ideal") == pytest.approx(100 / 5)
    alone, parts = told["serial", 4], told["sync_1f1b", 4]
    assert ours(*four, "speedup") == pytest.approx(parts["samples_per_s"] / alone["samples_per_s"])
    assert ours(*four, "factor") == pytest.approx(parts["kept_bytes"] / alone["kept_bytes"])
    assert ours(*four, "ideal") == pytest.approx(300 / 7)
    assert ours(*four, "bubble") > 0.9 * 300 / 7, "less is not possible, but for late pauses"
    for name, place in ((("gpipe", 2), two), (("sync_1f1b", 4), four)):
        for key, column, scale in (
            ("bubble_share", "bubble", 100),
            ("bubble_share_of_busiest", "busiest", 100),
            ("kept_bytes", "memory", 1e-6),
            ("kept_bytes_of_device", "device_memory", 1e-6),
        ):
            assert ours(*place, column) == pytest.approx(scale * told[name][key])
    stale = ("4", "emulated", "asynchronous", "ours")
    assert 0 <= ours(*stale, "busiest") <= ours(*stale, "bubble") < 100
    assert table[*four[:3], "variance", "speedup"]["status"] == "missing"
    there = {place[:4] for place, cell in table.items() if cell["status"] == "there"}
    serials = {(*("1", kind), "serial", "-") for kind in ("measured", "emulated")}
    assert there == {two, four, stale, *serials}, "all of one setting"
