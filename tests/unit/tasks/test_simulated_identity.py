"""What a simulation's plan is searched for, and which settings of searches make it another run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.launch.job import run_job
from sparsepipe.launch.prepare import prepare
from sparsepipe.schedule import Plan
from sparsepipe.tasks.simulate import in_one_process
from tests.support.command_line import composed

PAPER = ("task=simulate", "hardware=paper_7gpu", "task.timeline_minibatches=1")


def identity(outputs: Path, *overrides: str) -> str:
    config = composed(f"paths.outputs={outputs}", *PAPER, *overrides)
    inventory = build_inventory(config)
    return prepare(in_one_process(config), inventory).run_id


def plan_and_pace(outputs: Path, *overrides: str) -> tuple[list[object], float]:
    done = run_job(composed(f"paths.outputs={outputs}", *PAPER, *overrides))
    plan = Plan.from_json(done.plan.read_text())
    stages: list[object] = [(stage.layers, stage.devices) for stage in plan.stages]
    return stages, float(json.loads(done.result.read_text())["minibatch_s"])


def test_a_plan_is_searched_for_the_link_that_is_simulated(tmp_path: Path) -> None:
    """As it is for an inventory that has such a link."""
    slow = plan_and_pace(tmp_path, "parallel=exact", "task.link_bytes_per_s=10e6")
    same = plan_and_pace(tmp_path, "parallel=exact", "hardware.value.link.bytes_per_s=10e6")
    assert slow == same
    fast, _ = plan_and_pace(tmp_path, "parallel=exact", "task.link_bytes_per_s=10e9")
    assert slow[0] != fast


def test_a_bandwidth_of_the_search_comes_before_the_link(tmp_path: Path) -> None:
    at_60 = ("parallel=hete_mp", "parallel.search.bandwidth_bytes_per_s=60e6")
    slow, slow_s = plan_and_pace(tmp_path, *at_60, "task.link_bytes_per_s=10e6")
    fast, fast_s = plan_and_pace(tmp_path, *at_60, "task.link_bytes_per_s=10e9")
    assert slow == fast
    assert fast_s < slow_s


@pytest.mark.parametrize("parallel", ["dp", "paper_mp"])
def test_what_searches_nothing_has_no_settings_of_searches(tmp_path: Path, parallel: str) -> None:
    settings = ("bandwidth_bytes_per_s=60e6", "cost_model=eq4", "reserved_bytes=1e9", "search=mp")
    chosen = [f"parallel.search.{setting}" for setting in settings]
    assert identity(tmp_path, f"parallel={parallel}", *chosen) == identity(
        tmp_path, f"parallel={parallel}"
    )


def test_what_searches_has_them(tmp_path: Path) -> None:
    settings = ("grace_s=7", "search.bandwidth_bytes_per_s=60e6", "search.reserved_bytes=1e9")
    base, same, *others = (
        identity(tmp_path, "parallel=hete_mp", *more)
        for more in ([], *([f"parallel.{setting}"] for setting in settings))
    )
    assert same == base
    assert len({base, *others}) == 3


def test_memory_of_data_parallelism_leaves_the_settings_of_searches_alone(tmp_path: Path) -> None:
    """A finished run is taken up again whatever they are, so that they may change nothing."""
    paths = [tmp_path / name for name in ("plain", "reserved")]
    settings: list[list[str]] = [[], ["parallel.search.reserved_bytes=1e9"]]
    plain, reserved = (
        run_job(composed(f"paths.outputs={path}", *PAPER, "parallel=dp", *more)).path
        for path, more in zip(paths, settings, strict=True)
    )
    assert (plain / "devices.csv").read_text() == (reserved / "devices.csv").read_text()
