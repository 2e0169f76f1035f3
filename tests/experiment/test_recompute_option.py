"""``parallel.strategy.recompute``: what it may say, what is chosen by ``auto``, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from experiment_harness import composed
from planned_cases import MODEL, SLOW
from recompute_cases import AUTO, given

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError
from sparsepipe.experiment.prepare import prepare
from sparsepipe.experiment.recomputing import recompute_of, refuse_recompute, settled_recompute
from sparsepipe.experiment.rundir import RunDir
from sparsepipe.experiment.settle import settle
from sparsepipe.schedule import Plan

SEARCHED = ("parallel=gpipe", "parallel.search.search=hete_mp", SLOW)
BY_HAND = ("parallel=gpipe", "parallel.plan.config=1-1", "parallel.plan.cuts=[2]")


def inventory(memory_bytes: float | None) -> Inventory:
    device: dict[str, Any] = {"name": "core", "count": 2, "accelerator": "cpu"}
    if memory_bytes is not None:
        device["memory_bytes"] = int(memory_bytes)
    return Inventory.from_dict({"hosts": [{"name": "here", "devices": [device]}]})


def settled(
    tmp_path: Path, memory_bytes: float | None, *settings: str
) -> tuple[Plan, Mapping[str, Any]]:
    """The plan that a run begins with, and what its strategy is told in place of ``auto``."""
    config, directory = composed(*MODEL, *settings), RunDir(tmp_path / "run")
    refuse_recompute(config, inventory(memory_bytes))
    settle(config, inventory(memory_bytes), directory, measure=False)
    plan = Plan.from_json(directory.plan.read_text())
    return plan, settled_recompute(config["parallel"], plan.details)


def test_forms_that_it_may_have() -> None:
    def said(*settings: str) -> Any:
        return recompute_of(composed(*MODEL, "parallel=sync_1f1b", *settings)["parallel"])

    assert said() == "none"
    assert said("parallel.strategy.recompute=all") == "all"
    both = said("parallel.strategy.recompute={stages: [0], layers: [2, [3, 4]]}")
    assert both == {"stages": [0], "layers": [2, [3, 4]]}
    with pytest.raises(ConfigError, match=r"one of 'none', 'all', 'auto' or a mapping, not 'some'"):
        said("parallel.strategy.recompute=some")
    with pytest.raises(ConfigError, match=r"unknown key 'parallel\.strategy\.recompute'"):
        composed(*MODEL, "parallel=pipeline", "+parallel.strategy.recompute=all")


@pytest.mark.parametrize("stages", [SEARCHED, BY_HAND], ids=["searched", "by hand"])
@pytest.mark.parametrize(
    ("memory_bytes", "spans"),
    [
        (1e9, None),
        # Four parts of both layers are 2e6. Of three layers' parts and one more are less; the
        # outer ones are recomputed sooner.
        (1.4e6, [[0, 0], [3, 3]]),
        (0.3e6, [[0, 0], [1, 1], [2, 2], [3, 3]]),
    ],
)
def test_what_fits_is_chosen_before_ranks_start(
    tmp_path: Path, memory_bytes: float, spans: Any, stages: tuple[str, ...]
) -> None:
    plan, argument = settled(tmp_path, memory_bytes, *stages, AUTO, given(tmp_path))
    assert (plan.config, plan.cuts) == ("1-1", (2,))
    assert plan.details.get("recomputed") == spans
    assert argument == {"recompute": {"layers": spans} if spans else "none"}
    assert [name for stage in plan.stages for name in stage.devices] == [
        "here/core/0", "here/core/1"
    ]  # fmt: skip


def test_a_searched_plan_tells_what_is_asked_for(tmp_path: Path) -> None:
    asked = "parallel.strategy.recompute={layers: [[1, 2]]}"
    plan, argument = settled(tmp_path, 1e9, *SEARCHED, asked, given(tmp_path))
    assert plan.details["recomputed"] == [[1, 1], [2, 2]], "cut where stages end"
    assert argument == {}


def test_the_profiles_of_a_choice_are_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def identity(*settings: str) -> str:
        return prepare(composed(*MODEL, *BY_HAND, *settings), inventory(1e9)).run_id

    large, small = given(tmp_path), given(tmp_path, saved_bytes=1.0)
    assert identity(AUTO, large) != identity(AUTO, small)
    assert identity(large) == identity(small) != identity("parallel.strategy.recompute=all")


REFUSED: dict[str, tuple[float | None, tuple[str, ...], str]] = {
    "nor parallel.plan tells these": (1e9, ("parallel=gpipe", AUTO), "search.search=hete_mp"),
    "nor parallel.plan tells": (
        1e9, ("parallel=gpipe", AUTO, "parallel.plan.config=1-1"), "parallel.plan.cuts"
    ),
    "that of core is not known": (None, (*SEARCHED, AUTO, "GIVEN"), "memory_bytes of each device"),
    "there is none of mlp on core": (1e9, (*BY_HAND, AUTO), "task=profile"),
    "stage 0 does not fit its devices": (
        0.2e6, (*SEARCHED, AUTO, "GIVEN"), "parallel.strategy.microbatches"
    ),
    "beside weights there are 0.0 MiB": (
        1e3, (*BY_HAND, AUTO, "GIVEN"), "devices with more memory"
    ),
    "layer 9 is not among the layers 0 to 3": (
        1e9, (*SEARCHED, "parallel.strategy.recompute={layers: [9]}", "GIVEN"), "[first, last]"
    ),
    "layer 2 is named more than once": (
        1e9, (*BY_HAND, "parallel.strategy.recompute={layers: [2, [1, 3]]}"), "[first, last]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(tmp_path: Path, message: str) -> None:
    memory_bytes, settings, remedy = REFUSED[message]
    profile = given(tmp_path)
    with pytest.raises(ConfigError) as refused:
        settled(tmp_path, memory_bytes, *(profile if s == "GIVEN" else s for s in settings))
    assert message in refused.value.message
    assert remedy in refused.value.remedy
    assert not (tmp_path / "run").exists()


def test_the_plan_that_is_faster_with_what_it_recomputes_is_taken(tmp_path: Path) -> None:
    """One stage on both devices fits with recomputation only, and is still the faster plan."""
    fast = "parallel.search.bandwidth_bytes_per_s=1e12"
    config = composed(*MODEL, *SEARCHED[:2], AUTO, fast, given(tmp_path))
    plans = []
    for memory_bytes in (1e9, 0.9e6):
        directory = RunDir(tmp_path / f"{memory_bytes:g}")
        settle(config, inventory(memory_bytes), directory, measure=False)
        plans.append(Plan.from_json(directory.plan.read_text()))
    assert [plan.config for plan in plans] == ["2", "2"]
    ample, tight = plans
    assert "recomputed" not in ample.details
    assert tight.details["recomputed"]
    assert replace(tight, details={}) == replace(ample, details={})
    assert tight.details["profiles"] == ample.details["profiles"]
