"""The picture of a pipeline's schedule that trainings leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsepipe.config.schema import Synchronous
from sparsepipe.plots import timeline as pictures
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from tests.support.plans import plan_of


def drawn(
    plan: Plan,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    synchronous: Synchronous | None = None,
) -> dict:
    """What is drawn of a plan, and that it is."""
    (directory / "plan.json").write_text(plan.to_json())
    seen: dict = {}

    def note(lanes, path, **told):
        seen.update(told, lanes=lanes)
        really(lanes, path, **told)

    really = pictures.timeline_picture
    monkeypatch.setattr(pictures, "timeline_picture", note)
    pictures.draw_schedule(RunDir(directory), synchronous)
    assert (directory / "timeline.png").exists() == bool(seen)
    return seen


def test_stages_of_a_searched_plan_take_the_times_of_the_search(tmp_path, monkeypatch) -> None:
    plan = Plan.of(config="2-1", cuts=[3], num_layers=5)
    plan = replace(plan, details={"stage_times_s": [0.03, 0.06]})
    seen = drawn(plan, tmp_path, monkeypatch)
    assert seen["unit_name"] == "milliseconds"
    lengths = [
        {row[0]: pytest.approx(row[4] - row[3]) for row in rows if row[0] != "U"}
        for _, rows in seen["lanes"]
    ]
    # Two replicas take turns: each is busy twice as long as their stage is.
    assert lengths == [{"F": 20, "B": 40}] * 2 + [{"F": 20, "B": 40}]


def test_stages_of_a_plan_by_hand_are_alike(tmp_path, monkeypatch) -> None:
    seen = drawn(plan_of("1-1-1"), tmp_path, monkeypatch)
    assert seen["title"] == "Asynchronous pipeline 1-1-1, all stages alike"
    assert [name for name, _ in seen["lanes"]] == ["stage 0", "stage 1", "stage 2"]
    assert {round(row[4] - row[3], 9) for _, rows in seen["lanes"] for row in rows} == {0, 1, 2}


@pytest.mark.parametrize(
    ("schedule", "parts", "order"),
    [
        ("gpipe", 3, "F F F B B B U"),
        ("1f1b", 3, "F F B F B B U"),
        ("eager_1f1b", 4, "F F F B F B B B U"),
    ],
)
def test_a_synchronous_schedule_is_that_of_the_training(
    tmp_path, monkeypatch, schedule: str, parts: int, order: str
) -> None:
    plan = replace(plan_of("1-1"), details={"stage_times_s": [0.03 * parts] * 2})
    seen = drawn(plan, tmp_path, monkeypatch, Synchronous(schedule, parts))
    assert seen["title"] == f"Synchronous ({schedule}) pipeline 1-1, times as its search expected"
    _, first = seen["lanes"][0]
    assert [row[0] for row in first[: 2 * parts + 1]] == order.split()
    assert {round(row[4] - row[3], 6) for row in first} == {0, 10, 20}, "of a microbatch"


def test_one_device_has_no_schedule_to_show(tmp_path, monkeypatch) -> None:
    assert not drawn(Plan.of(config="1", cuts=[], num_layers=3), tmp_path, monkeypatch)
    (tmp_path / "plan.json").unlink()
    pictures.draw_schedule(RunDir(tmp_path))
