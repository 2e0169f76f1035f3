"""What a simulated plan is compared with: data parallelism on all devices of the inventory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.errors import HardwareError
from sparsepipe.launch.job import run_job
from tests.support.command_line import composed
from tests.support.emulated_cases import BACKWARD_S, FORWARD_S, profile

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


COPY_S = 0.005


@pytest.mark.parametrize(
    ("told", "mode", "copies"),
    [
        (True, "stash", True),
        (True, "vertical_sync", True),
        (True, "none", False),
        (True, "spectrain", False),
        (False, "stash", False),
    ],
)
def test_copies_count_where_weights_are_stashed_and_profiles_have_them(
    tmp_path: Path, told: bool, mode: str, copies: bool
) -> None:
    one = profile()
    each = tuple(replace(layer, copy_s=COPY_S) for layer in one.layers)
    replace(one, layers=each if told else one.layers).save(tmp_path / "mlp.json")
    device = f"{{name: gpu, count: 2, profile: {{mlp: {tmp_path / 'mlp.json'}}}}}"
    found, _ = outcome(
        tmp_path,
        *("experiment=tiny", "task=simulate", "hardware=cores"),
        f"hardware.value.hosts=[{{name: here, link: {{bytes_per_s: 1e15}}, devices: [{device}]}}]",
        *("parallel=pipeline", "parallel.plan.config=1-1", "parallel.plan.cuts=[2]"),
        f"parallel.strategy.mode={mode}",
    )
    stage_s = 2 * (FORWARD_S + BACKWARD_S)
    expected_s = stage_s + 2 * COPY_S * copies
    assert found["minibatch_s"] == pytest.approx(expected_s, rel=1e-6)


PAPER = ("task=simulate", "hardware=paper_5gpu", "task.timeline_minibatches=1")


@pytest.mark.parametrize("minibatches", [4, 16])
def test_data_parallelism_on_devices_that_are_alike(tmp_path: Path, minibatches: int) -> None:
    """On a link that takes no time a round takes what the layers take."""
    layers = profile()
    layers.save(tmp_path / "mlp.json")
    device = f"{{name: gpu, count: 8, profile: {{mlp: {tmp_path / 'mlp.json'}}}}}"
    found, _ = outcome(
        tmp_path,
        "experiment=tiny",
        "task=simulate",
        "hardware=cores",
        f"hardware.value.hosts=[{{name: here, link: {{bytes_per_s: 1e15}}, devices: [{device}]}}]",
        "parallel=dp",
        f"task.minibatches={minibatches}",
        "task.timeline_minibatches=1",
    )
    round_s = layers.num_layers * (FORWARD_S + BACKWARD_S)
    assert found["minibatch_s"] == pytest.approx(round_s / 8, rel=1e-6)
    assert found["epoch_s"] == pytest.approx(-(-minibatches // 8) * round_s, rel=1e-6)
    assert found["busy_share"] == pytest.approx(1.0, rel=1e-6)


def test_a_short_epoch_has_the_same_pace_as_a_long_one(tmp_path: Path) -> None:
    few, many = (
        outcome(tmp_path, *PAPER, "parallel=paper_mp", f"task.minibatches={count}")[0]
        for count in (3, 154)
    )
    for key in ("minibatch_s", "dp_minibatch_s", "speedup_over_dp", "busy_share"):
        assert few[key] == pytest.approx(many[key], rel=1e-6)
    assert few["epoch_s"] < many["epoch_s"] / 10
    assert few["epoch_minibatches"] == 3
