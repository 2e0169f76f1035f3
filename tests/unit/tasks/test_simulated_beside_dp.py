"""What a simulated plan is compared with: data parallelism on all devices of the inventory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import HardwareError
from sparsepipe.launch.job import run_job
from tests.support.command_line import composed

SIX = ("task=simulate", "hardware=paper_6gpu", "task.timeline_minibatches=1")
ON_ONE_SERVER = (*SIX, "parallel=pipeline", "parallel.plan.config=1-1", "parallel.plan.cuts=[24]")
WITHOUT_LINK = "hardware.value.link=null"


def outcome(outputs: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    done = run_job(composed(f"paths.outputs={outputs}", *overrides))
    return json.loads(done.result.read_text()), (done.path / "simulation.txt").read_text()


def test_a_plan_of_some_devices_is_compared_with_all(tmp_path: Path) -> None:
    found, told = outcome(tmp_path, *ON_ONE_SERVER)
    assert [device.split("/")[0] for device in found["plan_devices"]] == ["server1"] * 2
    everywhere, _ = outcome(tmp_path, *SIX, "parallel=dp")
    assert everywhere["plan_config"] == "6"
    assert found["dp_minibatch_s"] == everywhere["minibatch_s"]
    assert "data parallelism on all devices of the hardware" in told


def test_a_plan_needs_no_link_that_it_does_not_use(tmp_path: Path) -> None:
    found, told = outcome(tmp_path, *ON_ONE_SERVER, WITHOUT_LINK)
    with_link, _ = outcome(tmp_path, *ON_ONE_SERVER)
    assert found["minibatch_s"] == with_link["minibatch_s"]
    assert not [key for key in found if "over_dp" in key or key.startswith("dp_")]
    last = told.splitlines()[-1]
    assert last == (
        "not compared with data parallelism: the link of the inventory has no bandwidth"
    )
    with pytest.raises(HardwareError, match="the link of the inventory has no bandwidth"):
        outcome(tmp_path, *SIX, "parallel=dp", WITHOUT_LINK)
