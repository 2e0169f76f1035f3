"""A partition search, a cost model and a schedule from outside of the package, by dotted path.

The examples of docs/extending.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError, PlanError
from sparsepipe.launch.job import run_job
from sparsepipe.partition.devices import Choice
from sparsepipe.partition.problem import Problem
from sparsepipe.schedule import Plan, check, order_by_name, synchronous_by_name
from sparsepipe.strategies.pipeline.synchronous import SynchronousPipelineStrategy
from tests.support.command_line import composed
from tests.support.guide_cases import write_files
from tests.support.simulated_cases import SEARCHED, result
from tests.support.simulated_cases import run as simulated

PAPER = ("task=partition", "hardware=paper_8gpu", "task.bandwidth_bytes_per_s=60e6")


@pytest.fixture(autouse=True)
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "examples"))
    for path in write_files("extending", tmp_path / "examples"):
        assert len(path.read_text().splitlines()) <= 30, "examples are short enough to be read"
        monkeypatch.delitem(sys.modules, path.stem, raising=False)


def plan_by(outputs: Path, *overrides: str) -> Plan:
    done = run_job(composed(f"paths.outputs={outputs}", *PAPER, *overrides))
    return Plan.from_json(done.plan.read_text())


def test_a_search_of_ones_own(tmp_path: Path) -> None:
    plan = plan_by(tmp_path, "task.search=partition_search.even_layers")
    assert plan.replicas_of_stages == (1,) * 8
    assert {stage.num_layers for stage in plan.stages} == {6, 7}
    assert plan.details["strategy"] == "partition_search.even_layers"


def test_a_cost_model_of_ones_own(tmp_path: Path) -> None:
    own = plan_by(tmp_path, "task.search=dp", "task.cost_model=cost_model.SharedLinks")
    theirs = plan_by(tmp_path, "task.search=dp", "task.cost_model=pipedream")
    (own_s,), (theirs_s,) = own.details["stage_times_s"], theirs.details["stage_times_s"]
    assert own_s > theirs_s
    assert own.details["cost_model"]["class"] == "cost_model.SharedLinks"
    assert "class" not in theirs.details["cost_model"]


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    path = "pipeline_schedule.first_in_first_out"
    plan = Plan.of(config="2-1", cuts=[2], num_layers=4)
    made = synchronous_by_name(path, plan, 2, microbatches=4)
    check(made)
    assert str(made.actions[2][4]) == "B0.0", "after all forwards the first backward"
    own, gpipe = (
        result(simulated(tmp_path, *SEARCHED, f"task.schedule={name}", "task.microbatches=4"))
        for name in (path, "gpipe")
    )
    assert own["schedule"] == path
    assert own["minibatch_s"] > 0
    assert own["plan_config"] == gpipe["plan_config"]
    strategy = SynchronousPipelineStrategy(schedule=path, config="1-1")  # type: ignore[arg-type]
    assert strategy.schedule == path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.search=exat", "'exact' or 'exhaustive'"),
        ("task.search=partition_search.even_layer", "nearest: 'even_layers'"),
        ("task.search=nowhere.search", "module nowhere not found"),
        ("task.cost_model=pipedrem", "nearest: 'pipedream'"),
        ("task.cost_model=collections.Counter", "gives no cost model"),
    ],
)
def test_a_name_that_leads_nowhere(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_by(tmp_path, override)


def test_schedules_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"nearest: '1f1b'"):
        order_by_name("1f1")
    with pytest.raises(ConfigError, match="has no first_out"):
        order_by_name("pipeline_schedule.first_out")


def test_stages_that_are_no_plan_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import partition_search  # type: ignore[import-not-found]

    def half(problem: Problem) -> list[Choice]:
        return [Choice(first=0, end=problem.spans.num_layers - 1, counts=problem.pool.counts)]

    monkeypatch.setattr(partition_search, "even_layers", half)
    with pytest.raises(PlanError, match=r"partition_search.even_layers has found is no plan"):
        plan_by(tmp_path, "task.search=partition_search.even_layers")
