"""The picture of a pipeline's schedule that trainings leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparsepipe.config.schema import Synchronous
from sparsepipe.plots import pipeline as pictures
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from tests.support.plans import plan_of, plan_on


def drawn(
    plan: Plan,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    synchronous: Synchronous | None = None,
    slowdowns: dict[str, float] | None = None,
) -> dict:
    """What is drawn of a plan, and that it is."""
    (directory / "plan.json").write_text(plan.to_json())
    seen: dict = {}

    def note(panels, **told):
        ((title, lanes),) = panels.items()
        seen.update(told, title=title, lanes=lanes)
        return really(panels, **told)

    really = pictures.timelines_figure
    monkeypatch.setattr(pictures, "timelines_figure", note)
    pictures.draw_schedule(RunDir(directory), synchronous, slowdowns=slowdowns)
    assert (directory / "timeline.png").exists() == bool(seen)
    return seen


def expected(device: str, factor: float = 1.0) -> dict:
    return {"device": device, "forward": 0.02 * factor, "backward": 0.03 * factor, "update": 0.0}


UNLIKE = plan_on(["here/fast/0", "here/slow/0"], ["here/fast/1"], rank_times_s=[
    expected("fast"), expected("slow", 2), expected("fast", 0.5),
])  # fmt: skip


def test_each_rank_of_a_searched_plan_takes_the_times_of_its_own_device(
    tmp_path, monkeypatch
) -> None:
    seen = drawn(UNLIKE, tmp_path, monkeypatch)
    assert seen["unit_name"] == "milliseconds"
    assert [name for name, _ in seen["lanes"]] == [
        "stage 0, replica 0: here/fast/0",
        "stage 0, replica 1: slow",
        "stage 1: here/fast/1",
    ]
    assert lengths(seen) == [{"F": 20, "B": 30}, {"F": 40, "B": 60}, {"F": 10, "B": 15}]
    fast, slow = ([row for row in rows if row.kind == "U"] for _, rows in seen["lanes"][:2])
    assert [row.start for row in fast] == [row.start for row in slow], "replicas meet at updates"


def test_times_of_other_devices_than_those_of_the_run_do_not_count(tmp_path, monkeypatch) -> None:
    elsewhere = plan_on(["a/x/0", "a/y/0"], ["a/x/1"], **UNLIKE.details)
    seen = drawn(elsewhere, tmp_path, monkeypatch)
    assert lengths(seen) == [{"F": 1, "B": 2}] * 3


def test_a_device_that_is_made_slower_is_drawn_slower_without_a_search(
    tmp_path, monkeypatch
) -> None:
    plan = replace(UNLIKE, details={})
    seen = drawn(plan, tmp_path, monkeypatch, slowdowns={"here/slow/0": 3.0})
    assert (
        seen["title"] == "Asynchronous pipeline 2-1, all stages alike on devices of different speed"
    )
    assert lengths(seen) == [{"F": 1, "B": 2}, {"F": 3, "B": 6}, {"F": 1, "B": 2}]


def lengths(seen: dict) -> list[dict]:
    """How long a forward and a backward take in each lane; all of a lane must be alike."""
    found = [
        {
            (row.kind, round((row.end - row.start) / seen["unit"], 9))
            for row in rows
            if row.kind in "FB"
        }
        for _, rows in seen["lanes"]
    ]
    assert all(len(each) == 2 for each in found), found
    return [dict(each) for each in found]


def test_stages_of_a_plan_by_hand_are_alike(tmp_path, monkeypatch) -> None:
    seen = drawn(plan_of("1-1-1"), tmp_path, monkeypatch)
    assert seen["title"] == "Asynchronous pipeline 1-1-1, all stages alike"
    assert [name for name, _ in seen["lanes"]] == [f"stage {n}: rank {n}" for n in range(3)]
    assert {round(row.end - row.start, 9) for _, rows in seen["lanes"] for row in rows} == {0, 1, 2}


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
    times = {"forward": 0.01 * parts, "backward": 0.02 * parts, "update": 0.0}
    plan = plan_on(["a"], ["b"], rank_times_s=[{"device": name, **times} for name in "ab"])
    seen = drawn(plan, tmp_path, monkeypatch, Synchronous(schedule, parts))
    assert seen["title"] == f"Synchronous ({schedule}) pipeline 1-1, times as its search expected"
    _, first = seen["lanes"][0]
    assert [row.kind for row in first[: 2 * parts + 1]] == order.split()
    assert {round(row.end - row.start, 9) for row in first} == {0, 0.01, 0.02}, "of a microbatch"


def test_one_device_has_no_schedule_to_show(tmp_path, monkeypatch) -> None:
    assert not drawn(Plan.of(config="1", cuts=[], num_layers=3), tmp_path, monkeypatch)
    (tmp_path / "plan.json").unlink()
    pictures.draw_schedule(RunDir(tmp_path))
