"""Runs with overrides come into tables of their own, or are left out, and never into a mean."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.fig8 import FIG8
from sparsepipe.paper.chapters.table1 import TABLE1
from sparsepipe.paper.chapters.table2 import TABLE2
from sparsepipe.report.chapter import Block, Row
from sparsepipe.report.commands import Commands
from sparsepipe.report.overrides import is_made_by, of_training, overrides_of, word
from tests.support.desk_cases import ADAMW, DESK, MADE, as_desk
from tests.support.report_cases import cell, fitting, training, value

S1 = ("32³", "1", "sparse", "1")
S4 = ("32³", "4", "sparse", "1")
D1 = ("32³", "1", "dense", "1")
GPUS = {"hardware_accelerator": "cuda", "hardware_devices": "4 x RTX 2080 Ti"}
DESK_COMMAND = (
    *("experiment=table2", "scale=desk", "paper/trial=one_device"),
    *("paper/network=sparse", "data.resolution=32"),
)


def trained(network: str, resolution: int = 32, **more: Any) -> Row:
    """With all of its configuration, as a run has it."""
    optim = {"optim.schedule.factory.max_lr": more.get("optim.optimizer.lr", 0.03)}
    batch = {"data.batch_size": 4 if more.get("ranks", 1) > 1 else 16}
    return training(network, resolution, **{**DESK, **MADE, **optim, **batch, **more})


def recorded_adamw(rate: float) -> dict[str, Any]:
    """What a run with the option ``adamw`` has in its result."""
    return {
        **ADAMW,
        "optim.optimizer.lr": rate,
        "optim.schedule.factory.max_lr": rate,
        "hydra.choices.optim": "adamw",
    }


def tables(*rows: Row, known: bool = True) -> list[Block]:
    usual = as_desk if known else None
    return list(TABLE2.blocks(rows, Commands(experiment="table2", composed=usual)))


def overrides(row: Row) -> tuple[str, ...]:
    return overrides_of(row, DESK_COMMAND, as_desk, of_training)


def test_what_the_command_gives_is_no_override() -> None:
    assert overrides(trained("sparse")) == ()
    usual = trained("sparse", **{"data.num_workers": 3, "data.seed": 7, "seed": 7})
    assert overrides(usual) == ()
    assert is_made_by(usual, DESK_COMMAND, (), as_desk, of_training)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"data.batch_size": 8}, ("data.batch_size=8",)),
        ({"model.dropout": 0.0}, ("model.dropout=0.0",)),
        (
            {"optim.optimizer.lr": 0.1},  # which max_lr follows
            ("optim.optimizer.lr=0.1", "optim.schedule.factory.max_lr=0.1"),
        ),
        ({"trainer.precision": "bf16-mixed"}, ("trainer.precision=bf16-mixed",)),
        ({"trainer.limit_test_batches": 2}, ("trainer.limit_test_batches=2",)),
        ({"callbacks.stop._target_": "own.Stop"}, ("callbacks.stop._target_=own.Stop",)),
    ],
)
def test_an_unrecorded_configuration_is_compared_with_the_command(
    made: Row, words: tuple[str, ...]
) -> None:
    row = trained("sparse", **made)
    assert overrides(row) == words
    assert is_made_by(row, DESK_COMMAND, words, as_desk, of_training)
    assert not is_made_by(row, DESK_COMMAND, (), as_desk, of_training)
    assert not is_made_by(trained("sparse"), DESK_COMMAND, words, as_desk, of_training)


@pytest.mark.parametrize(
    ("made", "more", "words"),
    [
        (recorded_adamw(1e-3), ("optim=adamw",), ("optim=adamw",)),
        (
            recorded_adamw(0.1),
            ("optim=adamw", "optim.optimizer.lr=0.1"),
            ("optim=adamw", "optim.optimizer.lr=0.1"),
        ),
        (
            {
                "optim.schedule._target_": None,
                "optim.schedule.factory._target_": None,
                "optim.schedule.factory.max_lr": None,
            },
            ("optim.schedule=null",),
            ("optim.schedule=null",),
        ),
        ({}, ("data.batch_size=16", "data.num_workers=3", "optim=sgd_onecycle"), ()),
    ],
    ids=["group", "group and key", "null", "as usual"],
)
def test_recorded_overrides_count_that_the_command_does_not_give(
    made: Row, more: tuple[str, ...], words: tuple[str, ...]
) -> None:
    recorded = [*DESK_COMMAND, "seed=3", *more]
    choice = {"hydra.choices.optim": "sgd_onecycle"}
    whole = trained("sparse", **{**choice, **made, "hydra.overrides": recorded})
    row = {key: item for key, item in whole.items() if item is not None}
    assert overrides(row) == words
    assert is_made_by(row, DESK_COMMAND, words, as_desk, of_training)
    assert not words or not is_made_by(row, DESK_COMMAND, (), as_desk, of_training)
    assert not words or not is_made_by(trained("sparse"), DESK_COMMAND, words, as_desk, of_training)


def test_keys_that_a_run_lacks_are_not_compared() -> None:
    assert overrides(training("sparse", 32, **MADE)) == ()
    assert overrides_of(trained("sparse"), DESK_COMMAND, lambda *_: {}, of_training) == ()


def test_values_are_compared_as_a_ledger_has_them() -> None:
    """A column of unlike types is text there, and one of floats has no whole numbers."""
    assert overrides(trained("sparse", **{"data.batch_size": "16", "data.seed": 0.0})) == ()
    assert overrides(trained("sparse", **{"model.dropout": "0.2"})) == ()
    assert overrides(trained("sparse", **{"data.batch_size": 8.0})) == ("data.batch_size=8",)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (4.0, "4"),
        (1.0, "1.0"),
        (2.75e9, "2750000000"),
        (1e-4, "0.0001"),
        ("torch.optim.AdamW", "torch.optim.AdamW"),
        ("32-true", '"32-true"'),
        ("null", '"null"'),
        ([0.75, 1.0], "[0.75,1.0]"),
        (["chair", "a b"], '[chair,"a b"]'),
        ({"a": 1}, "{a:1}"),
    ],
)
def test_words_are_those_of_the_command_line(value: Any, text: str) -> None:
    assert word("key", value) == f"key={text}"


def test_runs_with_overrides_are_neither_averaged_nor_compared_with_others() -> None:
    usual, small = tables(
        trained("dense", epoch_s=40),
        trained("sparse", epoch_s=20, test=0.84),
        trained("sparse", epoch_s=10, test=0.80, seed=1, **{"data.batch_size": 8}),
    )
    assert value(usual, "test_accuracy", *S1) == pytest.approx(84)
    assert value(small, "test_accuracy", *S1) == pytest.approx(80)
    assert value(usual, "speedup", *S1) == pytest.approx(2)
    assert cell(small, "speedup", *S1).missing, "D-1 had other batches"
    assert "data.batch_size=8; Xeon" in small.title
    assert "batch_size" not in usual.title
    assert not [note for block in (usual, small) for note in block.notes if "mean" in note]


def test_their_commands_have_the_overrides() -> None:
    words = ["scale=desk", "optim=adamw", "data.batch_size=8", "paper/network=sparse"]
    made = {**recorded_adamw(1e-3), "data.batch_size": 8, "hydra.overrides": words}
    (block,) = tables(trained("sparse", **made))
    assert "; optim=adamw; data.batch_size=8; " in block.title
    assert block.sweep == (
        "sparsepipe -m experiment=table2 scale=desk optim=adamw data.batch_size=8"
    )
    lacking = cell(block, "speedup", *S1).command
    assert " optim=adamw data.batch_size=8 paper/trial=one_device paper/network=dense " in lacking


def test_a_run_that_the_command_of_two_tables_gives_is_in_both() -> None:
    """16 shapes on each of four devices: on one device that is no override."""
    usual, large = tables(
        trained("dense", epoch_s=40, **GPUS),
        trained("sparse", epoch_s=5, ranks=4, **{**GPUS, "data.batch_size": 16}),
        trained("sparse", epoch_s=10, ranks=4, **GPUS),
    )
    assert "data.batch_size=16" in large.title
    assert value(usual, "speedup", *S4) == pytest.approx(4)
    assert value(large, "speedup", *S4) == pytest.approx(8)
    assert value(large, "epoch_time", *D1) == value(usual, "epoch_time", *D1) == 40


def test_four_devices_alone_have_a_table_for_each_number_of_threads() -> None:
    threads = [trained("dense", machine_cores=4, threads_per_rank=count) for count in (1, 4)]
    several = trained("sparse", ranks=4, machine_cores=4, **{"data.batch_size": 16})
    found = tables(*threads, several)
    large = [block for block in found if "data.batch_size=16" in block.title]
    assert len(found) == 4
    assert [block.title.rpartition("; ")[2] for block in large] == [
        "1 thread a device",
        "4 threads a device",
    ]
    assert all(
        value(block, "epoch_time", *S4) == value(block, "epoch_time", *D1) for block in large
    )


def test_without_knowing_what_is_usual_a_mean_names_what_differs() -> None:
    (block,) = tables(
        trained("sparse", run_id="a"),
        trained("sparse", run_id="b", seed=1, **{"data.batch_size": 8, "data.seed": 1}),
        known=False,
    )
    (note,) = block.notes
    assert note.endswith("runs a, b differ in data.batch_size: the mean is of all")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"trainer.max_epochs": 1}, "; 1 epoch; "),
        ({"trainer.limit_train_batches": 4.0}, "; 4 epochs; epochs limited to 4 batches; "),
        ({"trainer.limit_train_batches": 1}, "; epochs limited to 1 batch; "),
        ({"trainer.limit_train_batches": 0.25}, "; epochs limited to 25 % of their batches; "),
    ],
)
def test_titles_say_how_long_is_trained(made: Row, words: str) -> None:
    (block,) = tables(trained("dense", **made))
    assert words in block.title


def test_batches_within_unlike_budgets_are_apart() -> None:
    wide, narrow = {"task.budget_bytes": 2.75e9}, {"task.budget_bytes": 1e9, "budget_bytes": 1e9}
    usual, small = tables(
        trained("dense"),
        fitting("dense", 32, batch=60, **MADE, **wide),
        fitting("sparse", 32, batch=150, **MADE, **wide),
        fitting("sparse", 32, batch=40, **MADE, **narrow),
    )[::-1]
    assert "batches within 2,750 MB" in usual.title
    assert "batches within 1,000 MB" in small.title
    assert value(usual, "batch_ratio", *S1) == pytest.approx(2.5)
    assert cell(small, "batch_ratio", *S1).missing
    assert value(usual, "test_accuracy", *D1) == value(small, "test_accuracy", *D1)
    fit = cell(small, "batch_ratio", *S1).command
    assert "paper/trial=largest_batch paper/network=dense" in fit
    assert fit.endswith(" task.budget_bytes=1000000000")
    assert "task" not in cell(usual, "batch", *S4).command
    assert "task" not in cell(small, "test_accuracy", *S1).command, "trainings have no budget"
    assert small.sweep == (
        "sparsepipe -m experiment=table2 scale=desk paper/trial=one_device,four_devices && "
        "sparsepipe -m experiment=table2 scale=desk paper/trial=largest_batch "
        "task.budget_bytes=1000000000"
    )


def test_commands_have_the_steps_of_trials() -> None:
    trials = [fitting("sparse", 32, batch=9, **MADE, **{"task.steps": steps}) for steps in (1, 2)]
    one, two = tables(*trials)
    assert cell(one, "batch_ratio", *S1).command.endswith(" task.steps=1")
    assert one.sweep.endswith("paper/trial=largest_batch task.steps=1")
    assert "task" not in cell(two, "batch_ratio", *S1).command


def test_what_takes_memory_sets_searches_apart() -> None:
    like = {key: DESK[key] for key in ("trainer.precision", "optim.optimizer._target_")}
    longer = {"trainer.max_epochs": 90, "data.batch_size": 99, "optim.optimizer.lr": 7.0}
    (block,) = tables(
        trained("dense"), fitting("sparse", 32, batch=60, **{**like, **longer, **MADE})
    )
    assert value(block, "batch", *S1) == 60
    half = {**like, "trainer.precision": "bf16-mixed"}
    found = tables(trained("dense"), fitting("sparse", 32, batch=90, **{**half, **MADE}))
    assert [value(block, "batch", *S1) for block in found] == [None, 90]
    assert "trainer.precision=bf16-mixed" in found[1].title


def test_files_of_unlike_data_sets_are_distinguished_by_their_number() -> None:
    files = {
        "data.source._target_": "sparsepipe.data.sources.OffTree",
        "data.source.train_per_class": None,
        "data.source.test_per_class": None,
    }
    ten, forty = tables(
        training("sparse", 32, test=0.9, train_shapes=3991, **files),
        training("sparse", 32, test=0.8, train_shapes=9843, **files),
        known=False,
    )
    assert "3,991 shapes" in ten.title
    assert "9,843 shapes" in forty.title
    assert (value(ten, "test_accuracy", *S1), value(forty, "test_accuracy", *S1)) == (
        pytest.approx(90),
        pytest.approx(80),
    )


def test_what_began_with_trained_weights_is_left_out() -> None:
    (block,) = tables(
        trained("sparse", test=0.8), trained("sparse", test=0.9, run_id="b", first_weights="1a2b")
    )
    assert value(block, "test_accuracy", *S1) == pytest.approx(80)
    (note,) = [note for note in block.notes if "Left out" in note]
    assert "b, which began with trained weights" in note
    assert "name=" in note


@pytest.mark.parametrize(
    ("key", "usually", "other"),
    [("task.budget_bytes", 2.75e9, 1e9), ("task.steps", 2, 1)],
)
def test_trials_of_fig8_are_apart(key: str, usually: float, other: float) -> None:
    def usual(words: Any, keys: Any) -> Any:
        return as_desk(("experiment=table2", *words[1:]), keys)

    told = {"name": "fig8", "task": "train_if_fits", "fits": True, key: usually}
    runs = [trained("sparse", **told), trained("dense", **{**told, key: other})]
    found = list(FIG8.blocks(runs, Commands(experiment="fig8", composed=usual)))
    assert [word(key, other) in block.title for block in found] == [False, True]


def test_speeds_of_small_matrices_are_apart() -> None:
    def measured(size: int, scale: str | None, flops: float) -> Row:
        return {
            **{"task_name": "table1", "measured_device": "Xeon", "flops_per_s": flops},
            **{"task.matrix_size": size, "task.copy_bytes": 2**30, "scale": scale},
            **{"hardware_accelerator": "cpu", "threads_per_rank": 2, "run_id": str(size)},
        }

    rows = [{k: v for k, v in measured(*each).items() if v is not None} for each in
            ((4096, None, 4e11), (512, "smoke", 1e11))]  # fmt: skip
    whole, smoke = TABLE1.blocks(rows, Commands(experiment="table1"))
    place = ("Xeon", "measured here, 2 threads")
    assert value(whole, "tflops", *place) == pytest.approx(0.4)
    assert value(smoke, "tflops", *place) == pytest.approx(0.1)
    assert whole.title == "matrices of 4,096 by 4,096; copies of 1,074 MB"
    assert smoke.title.startswith("scale smoke; matrices of 512 by 512")
    assert cell(smoke, "memory", *place).command == "sparsepipe experiment=table1 scale=smoke"
