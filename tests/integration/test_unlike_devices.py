"""Devices of different speed through the command line: who runs where, and that numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.cluster import Inventory, places_for
from sparsepipe.config.build import build_inventory
from sparsepipe.errors import ConfigError, HardwareError, PlanError
from sparsepipe.planning.devices import cuda_devices, cuda_numbers
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed, rows, weights
from tests.support.plans import plan_on
from tests.support.resolved import resolved, run_directory

Job = Callable[..., Path]
SPEEDS = "callbacks={speeds: {_target_: tests.support.tinyhouse.Speeds}}"
SHORT = ("parallel=pipeline", "trainer.max_epochs=1", SPEEDS)


def plan_file(path: Path, *devices: str, **details: object) -> str:
    """A plan for the small network, each device a stage."""
    plan = plan_on(devices[:1], devices[1:], cuts=[2], num_layers=4, **details)
    path.write_text(plan.to_json())
    return f"parallel.plan.file={path}"


def slowdowns(directory: Path) -> list[str]:
    return [(directory / f"speed{rank}").read_text() for rank in range(2)]


@pytest.mark.full
def test_the_plan_says_who_is_slow(shell: Shell) -> None:
    """It gives its first stage to the inventory's second device, and was searched for."""
    told = {"strategy": "exact", "bottleneck_s": 0.5}
    given = shell.cwd / "given.json"
    plan = plan_file(given, "here/half-speed/0", "here/full-speed/0", **told)
    run = shell(*SHORT, "hardware=two_speeds", plan).run
    assert slowdowns(shell.cwd) == ["2.0", "1.0"]
    kept = Plan.from_json((run / "plan.json").read_text())
    assert [stage.devices for stage in kept.stages] == [
        ("here/half-speed/0",), ("here/full-speed/0",)
    ]  # fmt: skip
    assert kept.details == told
    result = read_json(run / "result.json")
    assert result["plan_strategy"] == "exact"
    assert result["plan_shapes_per_s"] == result["data.batch_size"] / 0.5


@pytest.mark.parametrize("host", ["here", "as it was called before"])
def test_a_run_that_goes_on_keeps_its_devices(tmp_path: Path, host: str) -> None:
    directory = RunDir(tmp_path)
    plan_file(directory.plan, f"{host}/half-speed/0", f"{host}/full-speed/0", strategy="hete_mp")
    config = composed("experiment=tiny", "hardware=two_speeds", "parallel=hete_mp")
    places = resolved(config, directory=directory).places
    assert [place.slowdown for place in places] == [2.0, 1.0]
    other = composed("experiment=tiny", "hardware=cores", "parallel=hete_mp")
    with pytest.raises(PlanError, match=f"{host}/half-speed/0"):
        resolved(other, directory=directory)


@pytest.mark.full
def test_slow_ranks_change_no_number(shell: Shell) -> None:
    slowed = shell(*SHORT, "hardware=two_speeds", "parallel.plan.config=1-1").run
    assert slowdowns(shell.cwd) == ["1.0", "2.0"]
    plain = shell(*SHORT, "hardware=cores", "parallel.plan.config=1-1").run
    assert slowdowns(shell.cwd) == ["1.0", "1.0"]
    assert weights(slowed).equal(weights(plain))
    for name in ("train/loss", "val/loss"):
        assert rows(slowed)[-1][name] == rows(plain)[-1][name]


@pytest.mark.parametrize("parallel", ["single", "pipeline", "dp"])
def test_one_slow_device(job: Job, tmp_path: Path, parallel: str) -> None:
    hosts = "[{name: a, devices: [{name: x, count: 1, accelerator: cpu, slowdown: 1.5}]}]"
    job(
        f"parallel={parallel}",
        "hardware=cores",
        f"hardware.value.hosts={hosts}",
        "trainer.max_epochs=1",
        SPEEDS,
    )
    assert (tmp_path / "speed0").read_text() == "1.5"


def test_a_strategy_that_takes_no_slowdown_is_refused() -> None:
    config = composed(
        "experiment=tiny",
        "hardware=two_speeds",
        "parallel=dp",
        "parallel.strategy={_target_: pytorch_lightning.strategies.DDPStrategy}",
    )
    with pytest.raises(ConfigError, match=r"here/half-speed/0 .* takes no slowdown") as caught:
        run_directory(config)
    assert "keyword 'slowdown'" in caught.value.remedy


def test_slowdowns_are_part_of_the_hardware() -> None:
    config = composed("experiment=tiny", "parallel=dp", "++parallel.strategy.slowdown=2.0")
    with pytest.raises(ConfigError, match=r"parallel\.strategy\.slowdown is set") as caught:
        run_directory(config)
    assert "inventory" in caught.value.remedy


def test_stages_on_other_devices_are_another_run(tmp_path: Path) -> None:
    def path(hardware: str, *devices: str) -> Path:
        plan = plan_file(tmp_path / "plan.json", *devices)
        config = composed("experiment=tiny", "parallel=pipeline", f"hardware={hardware}", plan)
        return run_directory(config).path

    full, half = "here/full-speed/0", "here/half-speed/0"
    assert path("two_speeds", full, half) != path("two_speeds", half, full)
    assert path("two_speeds", full, half) == path("two_speeds", "rank 0", "rank 1")
    assert path("cores", full, half) == path("cores", half, full), "it has neither"


def test_gpus_that_are_not_here_are_refused() -> None:
    config = composed("experiment=tiny", "parallel=single", "hardware=paper_5gpu")
    inventory = build_inventory(config)
    places = resolved(config).places
    with pytest.raises(HardwareError, match="server1/TITAN V/0"):
        cuda_devices(places, inventory, rank=0, nodes=1)


def test_each_local_rank_has_the_gpu_of_its_rank() -> None:
    """Ranks 1 and 3 are on the first host, whose GPUs CUDA lists in another order."""
    counts = {"a": {"TITAN V": 1, "RTX 2080 Ti": 2}, "b": {"A100": 2}}
    inventory = Inventory.from_dict(
        {
            "hosts": [
                {"name": host, "devices": [{"name": n, "count": c} for n, c in devices.items()]}
                for host, devices in counts.items()
            ]
        }
    )
    plan = ["b/A100/1", "a/RTX 2080 Ti/1", "b/A100/0", "a/TITAN V/0"]
    places = places_for(inventory, plan, ranks=4, nodes=2)
    gpus = {
        "a": ["NVIDIA GeForce RTX 2080 Ti", "NVIDIA TITAN V", "NVIDIA GeForce RTX 2080 Ti"],
        "b": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"],
    }
    for ranks, host, numbers in (((1, 3), "a", [2, 1]), ((0, 2), "b", [1, 0])):
        for rank in ranks:
            assert cuda_numbers(places, inventory, gpus[host], rank=rank, nodes=2) == numbers
