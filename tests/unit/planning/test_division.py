"""How ``parallel.plan`` is read: by hand, from a file, by equal shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.cluster import Device, Host, Inventory
from sparsepipe.errors import ConfigError, HardwareError, PlanError
from sparsepipe.planning.division import Division, division_of
from sparsepipe.schedule import Plan
from tests.support.command_line import composed
from tests.support.resolved import resolved, run_directory

pytestmark = pytest.mark.usefixtures("workplace")
CORES = Inventory(
    hosts=(Host(name="a", devices=(Device(name="core", count=4, accelerator="cpu"),)),)
)
VECTORS = ("data=vectors", "model=mlp")  # four layers, five with norm
Job = Callable[..., Path]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A plan for four layers on three devices."""
    path = tmp_path / "plan.json"
    path.write_text(Plan.of(config="2-1", cuts=[3], num_layers=4).to_json())
    return f"parallel.plan.file={path}"


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        (("parallel=pipeline",), 4),
        (("parallel=pipeline", "parallel.devices=2"), 2),
        (("parallel=pipeline", "parallel.plan.cuts=[1,3]"), 3),
        (("parallel=pipeline", "parallel.plan.config=2-1"), 3),
        (("parallel=pipeline", "parallel.plan.config=2-1", "parallel.devices=3"), 3),
        (("parallel=pipeline", "parallel.plan.config=2"), 2),
        (("parallel=dp",), 4),
        (("parallel=single",), 1),
    ],
    ids=str,
)
def test_devices_follow_the_plan(settings: tuple[str, ...], ranks: int) -> None:
    assert resolved(composed(*VECTORS, *settings), CORES).ranks == ranks


def test_devices_follow_a_plan_file(file: str) -> None:
    config = composed(*VECTORS, "parallel=pipeline", file)
    assert resolved(config, CORES).ranks == 3
    division = division_of(config)
    assert division is not None
    assert division.arguments() == {"config": "2-1", "cuts": [3], "balance": "flops"}
    assert not division.searched
    assert [division.name(rank, ranks=3) for rank in range(3)] == [
        "rank 0 (stage 0)",
        "rank 1 (stage 0)",
        "rank 2 (stage 1)",
    ]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (["parallel.plan.config=4-1"], HardwareError, ["is for 5 devices", "has 4", "fewer"]),
        (["parallel.plan.config=2-1", "parallel.devices=2"], PlanError,
         ["is for 3 devices, but parallel.devices=2", "parallel.devices=auto"]),
        (["parallel.plan.config=2-x"], PlanError, ["'2-x'", "such as '2-1'"]),
        (["parallel.plan.file=no.json"], PlanError, ["no.json cannot be read", "plan.file"]),
        (["parallel.plan.file=no.json", "parallel.plan.cuts=[1]"], ConfigError, ["both file and"]),
        (["parallel.strategy.config=2-1"], ConfigError, ["set parallel.plan.config"]),
        (["parallel=dp", "parallel.plan.config=1-1"], ConfigError, ["parallel=pipeline"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)  # fmt: skip
def test_refused(settings: list[str], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as refused:
        resolved(composed(*VECTORS, "parallel=pipeline", *settings), CORES)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("parallel.plan.cuts=[4]",), ["do not split 4 layers", "from 1 to 3"]),
        (("parallel.plan.config=1-1-1", "parallel.plan.cuts=[2]"), ["cuts=[2] does not fit"]),
        (("FILE", "model.norm=true"), ["covers 4 layers, but the model has 5", "for this model"]),
    ],
    ids=["beyond", "count", "file"],
)
def test_plans_of_other_layers_are_refused(
    file: str, settings: tuple[str, ...], words: list[str]
) -> None:
    from tests.support.tinyhouse import VectorData

    given = [file if setting == "FILE" else setting for setting in settings]
    config = composed(*VECTORS, "parallel=pipeline", *given)
    with pytest.raises(PlanError) as refused:
        resolved(config, CORES).build_module(VectorData())
    assert all(word in str(refused.value) for word in words), refused.value
    assert refused.value.remedy


def test_more_ranks_than_devices_are_refused_before_data_are_prepared(job: Job) -> None:
    with pytest.raises(HardwareError, match=r"parallel\.plan is for 18 devices") as short:
        job("parallel=pipeline", "hardware=cores", "parallel.plan.config=9-9", "data.prepare_s=0.1")
    assert "hardware.cpu_devices=18" in short.value.remedy
    assert not Path("prepared").exists()


def test_identity_is_what_the_plan_says_and_not_where(file: str) -> None:
    def identity(*settings: str) -> str:
        config = composed(*VECTORS, "parallel=pipeline", *settings)
        return run_directory(config, CORES).run_id

    by_hand = ("parallel.plan.config=2-1", "parallel.plan.cuts=[3]")
    base = identity(file)
    assert identity(*by_hand) == base
    assert identity(*by_hand, "parallel.max_restarts=2", "parallel.devices=3") == base
    assert identity(by_hand[0], "parallel.plan.cuts=[2]") != base
    assert identity(by_hand[0]) != base
    assert identity(*by_hand, "parallel.strategy.mode=none") != base


def test_cuts_that_are_still_unknown_need_a_layer_for_each_stage() -> None:
    with pytest.raises(PlanError, match=r"^the plan 1-1 has 2 stages"):
        Division(config="1-1", cuts=None, balance="flops").check(num_layers=1)
