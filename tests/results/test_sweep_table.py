"""The closing table of a sweep as literal tables."""

from __future__ import annotations

from typing import Any

from sparsepipe.results.sweep_table import SweepJob, sweep_markdown, sweep_rows


def job(run: str | None, result: dict[str, Any], **overrides: str) -> SweepJob:
    return SweepJob(
        overrides={"experiment": "demo", **overrides},
        run=run,
        result={"kind": "measured", "ranks": 2, "git_commit": "x", **result} if run else {},
    )


def test_trainings() -> None:
    rows = sweep_rows(
        [
            job("out/a", {"train_shapes_per_s": 80.0, "test/accuracy": 0.5}, parallel="dp"),
            job(
                "out/b",
                {
                    "train_shapes_per_s": 100.0,
                    "test/accuracy": 0.625,
                    "plan_config": "1-1",
                    "plan_cuts": [17],
                },
                parallel="mp",
            ),
            job(
                "out/c",
                {
                    "train_shapes_per_s": 1200.0,
                    "test/accuracy": 1.0,
                    "plan_config": "2-1-1",
                    "plan_cuts": [9, 24],
                    "plan_shapes_per_s": 1500.0,
                },
                parallel="hete_mp",
            ),
            job(None, {}, parallel="exact"),
        ]
    )
    assert sweep_markdown(rows).splitlines() == [
        "| parallel | plan           | train shapes/s |  ratio | planned shapes/s | test accuracy "
        "| run    |",
        "| -------- | -------------- | -------------: | -----: | ---------------: | ------------: "
        "| ------ |",
        "| dp       |                |           80.0 |  1.00x |                  |         50.0% "
        "| out/a  |",
        "| mp       | 1-1 at 17      |          100.0 |  1.25x |                  |         62.5% "
        "| out/b  |",
        "| hete_mp  | 2-1-1 at 9, 24 |          1,200 | 15.00x |            1,500 |        100.0% "
        "| out/c  |",
        "| exact    |                |                |        |                  |               "
        "| failed |",
    ]
    assert rows[1] == {
        "parallel": "mp",
        "plan": "1-1 at 17",
        "train_shapes_per_s": 100.0,
        "ratio_to_first": 1.25,
        "plan_shapes_per_s": None,
        "test/accuracy": 0.625,
        "status": "finished",
        "run": "out/b",
    }
    assert rows[3]["status"] == "failed"
    assert {tuple(row) for row in rows} == {tuple(rows[0])}, "columns of a CSV"


def test_plans_are_simulated_and_nobody_trains() -> None:
    plan = {"kind": "simulated", "ranks": 1, "dp_s": 0.5}
    rows = sweep_rows(
        [
            job("a", {**plan, "plan_config": "4", "plan_cuts": [], "bottleneck_s": 0.5}, seed="1"),
            job("b", {**plan, "plan_config": "3-1", "plan_cuts": [8], "bottleneck_s": 0.4,
                      "dp_s": None}, seed="2"),
        ]
    )  # fmt: skip
    assert sweep_markdown(rows).splitlines() == [
        "| seed | kind      | plan     | bottleneck ms | DP ms | run |",
        "| ---: | --------- | -------- | ------------: | ----: | --- |",
        "|    1 | simulated | 4        |         500.0 | 500.0 | a   |",
        "|    2 | simulated | 3-1 at 8 |         400.0 |       | b   |",
    ]


def test_ratios_are_to_the_first_job_that_trained() -> None:
    rows = sweep_rows(
        [
            job(None, {}, seed="0", width="1"),
            job("b", {"train_shapes_per_s": 50.0}, seed="0", width="2"),
            job("c", {"train_shapes_per_s": 25.0, "ranks": 1}, seed="1", width="2"),
        ]
    )
    assert [row["ratio_to_first"] for row in rows] == [None, 1.0, 0.5]
    assert [row["ranks"] for row in rows] == [None, 2, 1], "ranks differ"
    assert list(rows[0])[:2] == ["seed", "width"]


def test_one_job_and_a_key_that_only_some_have() -> None:
    assert sweep_rows([job("a", {}, seed="0")]) == [{"status": "finished", "run": "a"}]
    rows = sweep_rows([job("a", {}), job("b", {}, seed="1")])
    assert [row["seed"] for row in rows] == ["", "1"]
