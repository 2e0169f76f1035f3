"""``parallel.strategy.recompute``: what it may say, what is chosen by ``auto``, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.cluster import Inventory
from sparsepipe.errors import ConfigError, PlanError, SparsePipeError
from sparsepipe.planning.division import division_of
from sparsepipe.planning.recomputation import refuse_recompute
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from tests.support.command_line import composed
from tests.support.planned_cases import MODEL
from tests.support.recompute_cases import AUTO, BY_HAND, SEARCHED, given, inventory, saved, settled
from tests.support.resolved import plan_run, run_directory


def test_forms_that_it_may_have() -> None:
    def said(*settings: str) -> Any:
        return composed(*MODEL, "parallel=sync_1f1b", *settings).parallel.recompute

    assert said() == "none"
    assert said("parallel.strategy.recompute=all") == "all"
    both = said("parallel.strategy.recompute={stages: [0], layers: [2, [3, 4]]}")
    assert both == {"stages": [0], "layers": [2, [3, 4]]}
    with pytest.raises(ConfigError, match=r"'none', 'all' or 'auto' or a mapping, not 'some'"):
        said("parallel.strategy.recompute=some")


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


def test_a_searched_plan_lists_the_given_spans(tmp_path: Path) -> None:
    asked = "parallel.strategy.recompute={layers: [[1, 2]]}"
    plan, argument = settled(tmp_path, 1e9, *SEARCHED, asked, given(tmp_path))
    assert plan.details["recomputed"] == [[1, 1], [2, 2]], "cut where stages end"
    assert argument == {}


@pytest.mark.parametrize(
    ("setting", "memory_bytes", "stages_s"),
    [
        ("none", 1e9, [9.0, 9.0]),
        ("all", 1e9, [12.0, 12.0]),
        ("{layers: [[1, 2]]}", 1e9, [11.0, 11.0]),
        ("{stages: [1]}", 1e9, [9.0, 12.0]),
        ("auto", 1e9, [9.0, 9.0]),
        ("auto", 1.4e6, [10.0, 10.0]),
    ],
)
def test_what_a_search_expects_has_the_second_runs_in_it(
    tmp_path: Path, setting: str, memory_bytes: float, stages_s: list[float]
) -> None:
    asked = f"parallel.strategy.recompute={setting}"
    plan, _ = settled(tmp_path, memory_bytes, *SEARCHED, asked, given(tmp_path))
    assert plan.details["stage_times_s"] == pytest.approx(stages_s)
    assert plan.details["bottleneck_s"] == pytest.approx(max(stages_s))
    table = (tmp_path / "run" / "plan.txt").read_text()
    assert f"{1e3 * max(stages_s):.1f} ms a minibatch" in table


@pytest.mark.parametrize("setting", ["all", "{stages: [0, 1]}", "{layers: [0, 1, 2, 3]}"])
def test_the_memory_of_what_is_recomputed_counts(tmp_path: Path, setting: str) -> None:
    """Two layers' activations of two batches are 4e6; of a part, and one at a time, 0.5e6."""
    asked = f"parallel.strategy.recompute={setting}"
    plan, _ = settled(tmp_path, 0.6e6, *SEARCHED, asked, given(tmp_path))
    assert plan.details["recomputed"] == [[0, 1], [2, 3]]
    assert all(0.5e6 < kept < 0.6e6 for kept in plan.details["memory_bytes"])
    with pytest.raises(PlanError, match="no plan fits the memory") as refused:
        settled(tmp_path / "no", 0.4e6, *SEARCHED, asked, given(tmp_path))
    assert "parallel.strategy.recompute=auto" in refused.value.remedy


def test_without_recomputation_the_parts_of_a_batch_count(tmp_path: Path) -> None:
    """Two layers' activations of all four parts are 2e6; of two whole batches they would be 4e6."""
    plan, argument = settled(tmp_path, 2.1e6, *SEARCHED, given(tmp_path))
    assert (plan.config, plan.cuts, argument) == ("1-1", (2,), {})
    assert "recomputed" not in plan.details
    assert all(2e6 < kept < 2.1e6 for kept in plan.details["memory_bytes"])
    with pytest.raises(PlanError, match="no plan fits the memory") as refused:
        settled(tmp_path / "no", 1.9e6, *SEARCHED, given(tmp_path))
    assert "parallel.strategy.recompute=auto" in refused.value.remedy


def test_second_runs_move_the_cuts_of_a_search(tmp_path: Path) -> None:
    path = saved(tmp_path / "slow.json", forward_s=(3.0, 3.0, 1.0, 5.0))
    own = (*SEARCHED[:2], "parallel.search.bandwidth_bytes_per_s=100",
           f"parallel.search.profiles={{core: {path}}}")  # fmt: skip
    for setting, cuts in {"none": (2,), "{layers: [0, 1]}": (2,), "{layers: [3]}": (3,)}.items():
        asked = f"parallel.strategy.recompute={setting}"
        plan, _ = settled(tmp_path / setting, 1e9, *own, asked)
        assert plan.cuts == cuts, setting


def test_auto_looks_for_a_cut_that_fits_unlike_devices(tmp_path: Path) -> None:
    """The small device holds one layer, recomputed; the best cut by times alone is in the middle.

    Of a first stage of n layers as one span four parts keep their output, 0.4e6, and one of them
    its inside, n 0.25e6.
    """
    devices = [
        {"name": "core", "count": 1, "accelerator": "cpu", "memory_bytes": 750_000},
        {"name": "large", "count": 1, "accelerator": "cpu", "memory_bytes": 100_000_000},
    ]
    unlike = Inventory.from_dict({"hosts": [{"name": "here", "devices": devices}]})
    path = saved(tmp_path / "unlike.json", activation_bytes=0.4e6)
    profiles = f"parallel.search.profiles={{core: {path}, large: {path}}}"
    fast = "parallel.search.bandwidth_bytes_per_s=1e9"
    config = composed(*MODEL, *SEARCHED[:2], AUTO, fast, profiles)
    directory = RunDir(tmp_path / "run")
    refuse_recompute(config, unlike, division_of(config))
    plan_run(config, directory, unlike)
    plan = Plan.from_json(directory.plan.read_text())
    assert [stage.devices for stage in plan.stages] == [("here/core/0",), ("here/large/0",)]
    assert plan.cuts == (1,)
    assert plan.details["recomputed"] == [[0, 0]]


def test_auto_says_that_it_counts_the_memory_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (*SEARCHED, AUTO, given(tmp_path))
    settled(tmp_path, 1e9, *settings)
    assert "memory=false" not in caplog.text
    settled(tmp_path / "no", 1e9, *settings, "parallel.search.memory=false")
    assert "despite memory=false" in caplog.text


def test_the_profiles_of_a_choice_are_part_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def identity(*settings: str) -> str:
        config = composed(*MODEL, *BY_HAND, "data.batch_size=4", *settings)
        return run_directory(config, inventory(1e9)).run_id

    large, small = given(tmp_path), given(tmp_path, saved_bytes=1.0)
    assert identity(AUTO, large) != identity(AUTO, small)
    assert identity(large) == identity(small) != identity("parallel.strategy.recompute=all")


REFUSED: dict[str, tuple[float | None, tuple[str, ...], str]] = {
    "neither a search nor parallel.plan": (1e9, ("parallel=gpipe", AUTO), "search.search=hete_mp"),
    "nor parallel.plan gives": (
        1e9, ("parallel=gpipe", AUTO, "parallel.plan.config=1-1"), "parallel.plan.cuts"
    ),
    "that of core is unknown": (None, (*SEARCHED, AUTO, "GIVEN"), "memory_bytes of each device"),
    "no profile of mlp on core": (1e9, (*BY_HAND, AUTO), "task=profile"),
    "no plan fits the memory of the devices": (
        0.2e6, (*SEARCHED, AUTO, "GIVEN"), "fewer microbatches"
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(tmp_path: Path, message: str) -> None:
    memory_bytes, settings, remedy = REFUSED[message]
    profile = given(tmp_path)
    with pytest.raises(SparsePipeError) as refused:
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
        plan_run(config, directory, inventory(memory_bytes))
        plans.append(Plan.from_json(directory.plan.read_text()))
    assert [plan.config for plan in plans] == ["2", "2"]
    ample, tight = plans
    assert "recomputed" not in ample.details
    assert tight.details["recomputed"]
    assert replace(tight, details={}) == replace(ample, details={})
    assert tight.details["profiles"] == ample.details["profiles"]
