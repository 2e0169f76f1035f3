"""The closing table of a sweep as literal tables."""

from __future__ import annotations

from typing import Any

from sparsepipe.sweep.table import Objective, SweepJob, best_line, sweep_markdown, sweep_rows


def job(run: str | None, result: dict[str, Any], **overrides: str) -> SweepJob:
    return SweepJob(
        overrides={"experiment": "demo", **overrides},
        run=run,
        status="failed" if run is None else "finished",
        result={"kind": "measured", "ranks": 2, "git_commit": "x", **result} if run else {},
    )


def test_trainings() -> None:
    rows = sweep_rows(
        [
            job("out/a", {"train_shapes_per_s": 80.0, "test/accuracy": 0.5}, parallel="dp"),
            job("out/b", {"train_shapes_per_s": 100.0, "test/accuracy": 0.625,
                          "plan_config": "1-1", "plan_cuts": [17]}, parallel="mp"),
            job("out/c", {"train_shapes_per_s": 1200.0, "test/accuracy": 1.0,
                          "plan_config": "2-1-1", "plan_cuts": [9, 24],
                          "plan_shapes_per_s": 1500.0}, parallel="hete_mp"),
            job(None, {}, parallel="exact"),
        ]
    )  # fmt: skip
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


def test_what_was_emulated_beside_what_was_simulated() -> None:
    """Each kind has its own column and ratios; epochs of unlike lengths are told apart."""
    dp = {"plan_config": None, "minibatches_per_s": 2.0}
    mp = {"plan_config": "3-1", "plan_cuts": [8], "minibatches_per_s": 3.0}
    simulated = {"kind": "simulated", "ranks": 1, "epoch_minibatches": 154}
    emulated = {"kind": "emulated", "ranks": 4}
    rows = sweep_rows(
        [
            job("a", {**simulated, **dp, "simulated_shapes_per_s": 128.0, "epoch_s": 77.5},
                task="simulate", parallel="dp"),
            job("b", {**simulated, **mp, "simulated_shapes_per_s": 192.0, "epoch_s": 52.0},
                task="simulate", parallel="mp"),
            job("c", {**emulated, **dp, "samples_per_s": 120.0, "epoch_s": 50.0,
                      "minibatches": 96}, task="emulate", parallel="dp"),
            job("d", {**emulated, **mp, "samples_per_s": 150.0, "epoch_s": 9.0,
                      "minibatches": 24}, task="emulate", parallel="mp"),
        ]
    )  # fmt: skip
    assert sweep_markdown(rows).splitlines() == [
        "| task     | parallel | kind      | ranks | plan     | simulated shapes/s "
        "| emulated samples/s | ratio | epoch s | of minibatches | run |",
        "| -------- | -------- | --------- | ----: | -------- | -----------------: "
        "| -----------------: | ----: | ------: | -------------: | --- |",
        "| simulate | dp       | simulated |     1 |          |              128.0 "
        "|                    | 1.00x |    77.5 |            154 | a   |",
        "| simulate | mp       | simulated |     1 | 3-1 at 8 |              192.0 "
        "|                    | 1.50x |    52.0 |            154 | b   |",
        "| emulate  | dp       | emulated  |     4 |          |                    "
        "|              120.0 | 1.00x |    50.0 |             96 | c   |",
        "| emulate  | mp       | emulated  |     4 | 3-1 at 8 |                    "
        "|              150.0 | 1.25x |     9.0 |             24 | d   |",
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


LOSS = {"a": 0.5, "b": 0.25, "c": 0.25}


def searched() -> list[SweepJob]:
    rates = {"a": "0.012520653814999465", "b": "0.02693883019285411", "c": "0.001605191133358762"}
    return [
        SweepJob(
            overrides={"experiment": "demo", "optim.optimizer.lr": rates[name]},
            run=f"outputs/demo/{name * 12}",
            result={
                **{"kind": "measured", "val/accuracy": 0.5, "val/loss": loss},
                **{"train_shapes_per_s": 80.0, "inference_shapes_per_s": 300.0},
                **{"test_shapes_per_s": 200.0, "test/accuracy": 1.0 if name == "a" else 0.25},
            },
        )
        for name, loss in LOSS.items()
    ]


def test_the_best_row_is_the_objectives_and_comes_before_figures_of_the_test() -> None:
    rows = sweep_rows(searched(), Objective(key="val/loss"))
    assert list(rows[0]) == [
        *("optim.optimizer.lr", "best", "val/loss", "val/accuracy"),
        *("train_shapes_per_s", "ratio_to_first"),
        *("test_shapes_per_s", "inference_shapes_per_s", "test/accuracy", "status", "run"),
    ]
    assert [row["best"] for row in rows] == ["", "*", ""], "the first with the smallest loss"
    largest = sweep_rows(searched(), Objective(key="val/loss", mode="max"))
    assert [row["best"] for row in largest] == ["*", "", ""]
    assert "best" not in sweep_rows(searched(), Objective(key="val/error"))[0], "nobody has it"
    line = best_line(searched(), ["lr=1", "lr=2", "lr=3"], Objective(key="val/loss"))
    assert line == (
        "best, by the smallest val/loss (0.25): lr=2, run outputs/demo/bbbbbbbbbbbb; "
        "1 more with the same value"
    )
    assert best_line(searched(), ["", "", ""], Objective(key="val/error")) is None


def test_without_a_validation_the_table_says_why_no_job_is_the_best() -> None:
    line = best_line(searched(), ["", "", ""], None)
    assert line is not None
    assert "data.val_share" in line
    assert best_line(searched()[:1], [""], None) is None, "there is nothing to choose"
    assert best_line([job("a", {}), job("b", {})], ["", ""], None) is None, "nor to choose by"


def test_a_narrow_table_keeps_what_jobs_are_called_and_the_objective() -> None:
    objective = Objective(key="val/loss")
    rows = sweep_rows(searched(), objective)
    assert "0.012520653814999465" in sweep_markdown(rows, objective, width=300), "nothing is cut"
    assert sweep_markdown(rows, objective, width=80).splitlines() == [
        "|       lr | best | val/loss | val accuracy | train shapes/s | run          |",
        "| -------: | ---- | -------: | -----------: | -------------: | ------------ |",
        "|  0.01252 |      |      0.5 |        50.0% |           80.0 | aaaaaaaaaaaa |",
        "|  0.02694 | *    |     0.25 |        50.0% |           80.0 | bbbbbbbbbbbb |",
        "| 0.001605 |      |     0.25 |        50.0% |           80.0 | cccccccccccc |",
    ]
