"""Table II from a ledger made by hand, against figures computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparsepipe.paper.chapters.trainings import TABLE2
from sparsepipe.report.chapter import Block, Compare
from sparsepipe.runs.ledger_table import Row
from tests.support.report_cases import cell, fitting, training, value


def blocks(*rows: Row) -> list[Block]:
    return list(TABLE2.blocks(rows))


S1 = ("32³", "1", "sparse", "1")
D1 = ("32³", "1", "dense", "1")
S4 = ("32³", "4", "sparse", "1")


def test_a_speedup_is_over_the_dense_network_on_one_device_at_the_same_resolution() -> None:
    (block,) = blocks(
        training("dense", 32, epoch_s=40),
        training("sparse", 32, epoch_s=25),
        training("dense", 50, epoch_s=100),
        training("sparse", 50, epoch_s=25),
    )
    assert value(block, "speedup", *S1) == pytest.approx(1.6)
    assert value(block, "speedup", *D1) == 1
    assert value(block, "speedup", "50³", "1", "sparse", "1") == pytest.approx(4)
    found = cell(block, "speedup", *S1)
    assert found.paper is not None
    assert found.paper.text == "1.33"
    assert found.compared == pytest.approx(1.6 / 1.33)


REAL = {"data.source._target_": "sparsepipe.data.sources.OffTree"}


def test_accuracies_on_generated_shapes_are_not_compared() -> None:
    (block,) = blocks(training("sparse", 32, test=0.88))
    assert value(block, "test_accuracy", *S1) == pytest.approx(88)
    assert cell(block, "test_accuracy", *S1).compared is None
    for each in (block, *blocks()):
        assert {column.compare for column in each.columns} == {Compare.NOT, Compare.RATIO}


def test_accuracies_on_the_papers_shapes_are_compared_in_points() -> None:
    (block,) = blocks(training("sparse", 32, test=0.88, train=0.9, **REAL))
    assert cell(block, "test_accuracy", *S1).compared == pytest.approx(88 - 86.28)
    found = cell(block, "train_accuracy", *S1)
    assert found.compared == pytest.approx(90 - 99.95)
    assert found.ours is not None
    assert replace(found, ours=replace(found.ours, counts=False)).compared is None


def test_seeds_are_averaged_and_their_spread_is_kept() -> None:
    (block,) = blocks(
        training("dense", 32, epoch_s=40),
        training("sparse", 32, epoch_s=20, test=0.84, seed=0),
        training("sparse", 32, epoch_s=25, test=0.86, seed=1),
        training("sparse", 32, epoch_s=20, test=0.88, seed=2),
    )
    found = cell(block, "test_accuracy", *S1).ours
    assert found is not None
    assert (found.value, found.spread, len(found.runs)) == (pytest.approx(86), (84, 88), 3)
    speedup = cell(block, "speedup", *S1).ours
    assert speedup is not None
    assert speedup.value == pytest.approx((2 + 1.6 + 2) / 3)
    assert speedup.spread == (pytest.approx(1.6), pytest.approx(2))
    assert not [note for note in block.notes if "seed" in note]


def test_runs_with_one_seed_are_noted() -> None:
    (block,) = blocks(
        training("sparse", 32, run_id="a", **{"optim.optimizer.lr": 0.1}),
        training("sparse", 32, run_id="b", **{"optim.optimizer.lr": 0.2}),
    )
    (note,) = block.notes
    assert "runs a, b all have seed 0 and differ in optim.optimizer.lr" in note


@pytest.mark.parametrize(
    ("more", "note"),
    [
        ({"machine_cores": 2}, "no speedup: 4 ranks share 2 cores"),
        ({"machine_cores": None}, "the number of CPU cores of 4 ranks is not recorded"),
    ],
)
def test_ranks_that_share_cores_give_no_speedup(more: dict[str, Any], note: str) -> None:
    crowded = training("sparse", 32, ranks=4, epoch_s=30, **more)
    (block,) = blocks(training("dense", 32, epoch_s=40), crowded)
    speedup, time = cell(block, "speedup", *S4), cell(block, "epoch_time", *S4)
    assert speedup.ours is not None
    assert (speedup.ours.value, speedup.ours.counts) == ("no speedup", False)
    assert speedup.compared is None
    assert not speedup.missing, "it was run for its accuracy"
    assert time.ours is not None
    assert time.ours.value == 30
    assert note in time.ours.note
    assert note in speedup.ours.note
    assert value(block, "test_accuracy", *S4) == pytest.approx(85)


ONE_THREAD = {"machine_cores": 4, "threads_per_rank": 1}


@pytest.mark.parametrize(
    "more",
    [ONE_THREAD, {"machine_cores": 2, "hardware_accelerator": "cuda"}],
    ids=["a core for each device", "GPUs"],
)
def test_ranks_on_devices_of_their_own_give_one(more: dict[str, Any]) -> None:
    (block,) = blocks(
        training("dense", 32, epoch_s=40, **more),
        training("sparse", 32, ranks=4, epoch_s=10, **more),
    )
    assert value(block, "speedup", *S4) == pytest.approx(4)
    assert cell(block, "speedup", *S4).compared == pytest.approx(4 / 4.72)


@pytest.mark.parametrize(
    ("cores", "alone", "of_a_rank", "note"),
    [
        (4, 4, 1, "no speedup: 4 ranks compute on 4 cores in all, D-1 alone on 4"),
        (8, 8, 1, "no speedup: 4 ranks compute on 4 cores in all, D-1 alone on 8"),
        (16, 16, 4, "no speedup: 4 ranks compute on 16 cores in all, D-1 alone on 16"),
        (4, None, None, "no speedup can be given: the number of cores in use is not recorded"),
    ],
)
def test_ranks_on_no_more_cores_than_one_device_give_none(
    cores: int, alone: int | None, of_a_rank: int | None, note: str
) -> None:
    """One device computes on all cores by threads: that is the same silicon."""
    (block,) = blocks(
        training("dense", 32, epoch_s=40, machine_cores=cores, threads_per_rank=alone),
        training(
            "sparse", 32, ranks=4, epoch_s=10, machine_cores=cores, threads_per_rank=of_a_rank
        ),
    )
    speedup, time = cell(block, "speedup", *S4), cell(block, "epoch_time", *S4)
    assert speedup.ours is not None
    assert time.ours is not None
    assert (speedup.ours.value, speedup.ours.note) == ("no speedup", note)
    assert speedup.compared is None
    assert (time.ours.value, time.ours.note) == (10, note)
    assert value(block, "test_accuracy", *S4) == pytest.approx(85)


def test_one_device_of_more_threads_is_another_device() -> None:
    """Four ranks belong to both; they are a speedup over the one with one thread."""
    one, all_four = blocks(
        training("dense", 32, epoch_s=40, **ONE_THREAD),
        training("dense", 32, epoch_s=16, machine_cores=4),
        training("sparse", 32, epoch_s=8, machine_cores=4),
        training("sparse", 32, ranks=4, epoch_s=10, machine_cores=4),
        fitting("dense", 32, batch=60, hardware_accelerator="cpu", threads_per_rank=3),
    )
    assert one.title.endswith("; Xeon; 1 thread a device")
    assert all_four.title.endswith("; Xeon; 4 threads a device")
    assert value(all_four, "speedup", *S1) == pytest.approx(2), "both on four threads"
    assert value(one, "speedup", *S1) is None
    assert value(one, "speedup", *S4) == pytest.approx(4)
    assert value(all_four, "speedup", *S4) == "no speedup"
    assert value(one, "batch", *D1) == value(all_four, "batch", *D1) == 60


def test_batches_are_of_one_device_and_over_those_of_the_dense_network() -> None:
    (block,) = blocks(
        training("dense", 32),
        fitting("dense", 32, batch=60),
        fitting("sparse", 32, batch=150),
        fitting("sparse", 32, 0.25, batch=240),
    )
    assert value(block, "batch", *S1) == value(block, "batch", *S4) == 150
    assert value(block, "batch_ratio", *S1) == pytest.approx(2.5)
    assert cell(block, "batch_ratio", *S1).compared == pytest.approx(2.5 / (256 / 128))
    assert value(block, "batch_ratio", "32³", "1", "sparse", "0.25") == pytest.approx(4)
    assert "at most 2,750 MB" in block.notes[0]


def test_what_did_not_come_about_alike_is_not_compared() -> None:
    """Other shapes, widths, lengths, scales and devices make blocks of their own."""
    base = training("dense", 32, epoch_s=40)
    others = [
        {"scale": "smoke"},
        {"data.source._target_": "sparsepipe.data.sources.NpzBundle"},
        {"data.num_points": 1024},
        {"model.width": 0.5},
        {"trainer.max_epochs": 9},
        {"hardware_devices": "1 x H100"},
    ]
    found = blocks(base, *(training("sparse", 32, epoch_s=10, **more) for more in others))
    assert len(found) == 1 + len(others)
    assert len({block.title for block in found}) == len(found), "titles tell them apart"
    for block in found:
        assert not isinstance(value(block, "speedup", *S1), float)


def test_a_search_for_the_batch_counts_however_long_is_trained() -> None:
    fit = fitting("dense", 32, batch=60, **{"trainer.max_epochs": 90})
    (block,) = blocks(training("dense", 32), fit)
    assert value(block, "batch", *D1) == 60
    (alone,) = blocks(fit)
    assert value(alone, "batch", *D1) == 60


def test_a_command_makes_what_is_missing() -> None:
    (block,) = blocks(training("dense", 32))
    assert cell(block, "test_accuracy", "50³", "4", "sparse", "0.25").missing
    assert block.sweep == "sparsepipe -m experiment=table2 scale=desk"


def test_titles_name_other_data() -> None:
    source = {"data.source._target_": "sparsepipe.data.sources.NpzBundle", "data.num_points": None}
    given = {"hydra.overrides": ["scale=desk", "data=modelnet40_points"]}
    (block,) = blocks(training("dense", 32, **source, **given))
    assert "ModelNet40 as point clouds, all their points" in block.title
