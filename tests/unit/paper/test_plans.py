"""The paper's MP as plan files: its splits with the best cuts, on its GPUs in its order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.config.compose import ASSETS
from sparsepipe.errors import PlanError
from sparsepipe.paper.plans import MODEL, MP_DEVICE, paper_mp_plan, paper_problem
from sparsepipe.partition.explanation import as_plan, explain
from sparsepipe.partition.search.algorithms import mp
from sparsepipe.planning.device_profiles import load_profiles
from sparsepipe.planning.division import division_of
from sparsepipe.planning.plan_resolution import plan_to_simulate
from sparsepipe.schedule import Plan
from tests.support.command_line import composed

SPLITS = {5: "1-2-1-1", 6: "4-1-1", 7: "4-1-1-1", 8: "4-1-1-1-1"}  # Table III


def shipped(gpus: int) -> Path:
    return ASSETS / "plans" / "paper" / f"mp_{gpus}gpu.json"


def models(plan: Plan) -> list[str]:
    """The device of each rank."""
    return [device.split("/")[1] for stage in plan.stages for device in stage.devices]


@pytest.mark.parametrize("gpus", SPLITS)
def test_the_shipped_files_are_what_is_computed(gpus: int) -> None:
    there = json.loads(shipped(gpus).read_text())
    made = json.loads(paper_mp_plan(gpus).to_json())
    of_ranks = made.pop("rank_times_s")  # files are older, and runs go by their fingerprints
    assert len(of_ranks) == gpus
    assert there.keys() == made.keys()
    for key in ("bottleneck_s", "dp_s", "stage_times_s", "transfer_times_s"):
        assert there.pop(key) == pytest.approx(made.pop(key), rel=1e-9)
    assert there == made


@pytest.mark.parametrize("gpus", SPLITS)
def test_stages_take_the_gpus_as_the_table_lists_them(gpus: int) -> None:
    plan = Plan.from_json(shipped(gpus).read_text())
    assert plan.config == SPLITS[gpus]
    assert plan.num_layers == 52
    if gpus == 8:  # the first stage ends where the paper says
        assert (plan.stages[0].layers, plan.stages[0].replicas) == ((0, 23), 4)
    found = models(plan)
    assert found == ["TITAN V"] + (gpus - 5) * ["TITAN Xp"] + 4 * ["RTX 2080 Ti"]
    ours = paper_problem(gpus, "sparsepipe_mp", 60e6)
    searched = as_plan(ours, explain(ours, mp(ours, device=MP_DEVICE)))
    assert models(searched) == found, "our own search does the same"


@pytest.mark.parametrize("gpus", SPLITS)
def test_it_is_chosen_by_the_number_of_gpus(gpus: int) -> None:
    config = composed("parallel=paper_mp", f"hardware=paper_{gpus}gpu")
    division = division_of(config)
    assert division is not None
    assert (division.config, division.num_ranks) == (SPLITS[gpus], gpus)
    inventory = build_inventory(config)
    profiles = load_profiles(inventory, MODEL, given={})
    plan = plan_to_simulate(config, division, inventory, profiles)
    assert models(plan) == models(paper_mp_plan(gpus))


def test_other_hardware_has_none() -> None:
    config = composed("parallel=paper_mp", "hardware=two_speeds")
    with pytest.raises(PlanError, match=r"plans/paper/mp_.*cannot be read") as caught:
        division_of(config)
    assert "parallel.plan.file" in caught.value.remedy
