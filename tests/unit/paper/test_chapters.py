"""Tables I and III, Fig. 7, 8 and 9 from ledgers made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.paper.chapters.fig7 import FIG7
from sparsepipe.paper.chapters.fig9 import FIG9
from sparsepipe.paper.chapters.table1 import TABLE1
from sparsepipe.paper.chapters.table3 import TABLE3
from sparsepipe.paper.chapters.trainings import FIG8
from sparsepipe.paper.printed import printed
from sparsepipe.report.chapter import Block, Chapter
from sparsepipe.runs.ledger_table import Row
from tests.support.report_cases import cell, run, training, value

GPUS = {5: "1 x TITAN V, 4 x RTX 2080 Ti", 8: "1 x TITAN V, 3 x TITAN Xp, 4 x RTX 2080 Ti"}


@pytest.mark.parametrize("exhibit", CHAPTERS.values(), ids=lambda each: each.name)
def test_without_runs_all_is_missing_and_nothing_is_drawn(exhibit: Chapter) -> None:
    found = exhibit.blocks([])
    assert found
    for block in found:
        assert any(each.missing for each in block.cells)
        assert all(each.ours is None for each in block.cells)
        assert all(len(each.row) == len(exhibit.heads) for each in block.cells)
        if exhibit.draw is not None:
            assert exhibit.draw(block) is None
        assert block.sweep.startswith(f"sparsepipe -m experiment={exhibit.name}")
    keys = {column.key for block in found for column in block.columns}
    assert set(exhibit.pictured) <= keys


def simulated(strategy: str, gpus: int, minibatch_s: float, **more: Any) -> Row:
    """As task=simulate leaves it."""
    return run(
        "simulate",
        "fig9",
        **{
            "study.cell.gpus": gpus,
            "study.cell.parallel": strategy,
            "kind": "simulated",
            "hardware_devices": GPUS[gpus],
            "hardware_accelerator": "cuda",
            "minibatches_per_s": 1 / minibatch_s,
            "task.link_bytes_per_s": 125e6,
            "hardware.value.link.bytes_per_s": 125e6,
            **more,
        },
    )


def fig9(*rows: Row) -> dict[str, Block]:
    return {block.title: block for block in FIG9.blocks(rows)}


AT_125 = "simulated, 125 MB/s between hosts"


def test_speedups_of_fig9_are_over_dp_on_as_many_gpus() -> None:
    block = fig9(
        simulated("dp", 5, 0.8),
        simulated("hete_mp", 5, 0.32, dp_minibatch_s=9.0, plan_config="4-1", plan_cuts=[24]),
        simulated("dp", 8, 0.6),
        simulated("paper_mp", 8, 0.4),
        simulated("exact", 8, 0.2),
    )[AT_125]
    assert value(block, "speedup", "5", "HETE-MP") == pytest.approx(2.5), "its own job, not told"
    assert value(block, "plan", "5", "HETE-MP") == "4-1 at 24"
    assert cell(block, "speedup", "5", "HETE-MP").compared == pytest.approx(2.5 / 3.11)
    assert value(block, "speedup", "8", "MP, the paper's split") == pytest.approx(1.5)
    assert value(block, "minibatch", "8", "exact") == pytest.approx(200)
    assert cell(block, "speedup", "8", "exact").paper is None
    derived = cell(block, "speedup", "8", "HETE-MP").paper
    assert derived is not None
    assert (derived.text, derived.derived) == ("2.63", "not printed: 1.98 times MP, printed")
    block = fig9(simulated("hete_mp", 5, 0.4, dp_minibatch_s=0.8))[AT_125]
    assert value(block, "speedup", "5", "HETE-MP") == pytest.approx(2)
    assert cell(block, "minibatch", "5", "DP").missing


def test_each_way_to_take_fig9_has_a_block_of_its_own() -> None:
    emulated = {"kind": "emulated", "network": "namespaces", "link_bytes_per_s": 125e6}
    found = fig9(
        simulated("dp", 5, 0.8),
        simulated("dp", 5, 1.6, **{"task.link_bytes_per_s": 50e6}),
        simulated("dp", 5, 0.9, **emulated),
    )  # fmt: skip
    times = {title: value(block, "minibatch", "5", "DP") for title, block in found.items()}
    assert times == {
        "simulated, 50 MB/s between hosts": pytest.approx(1600),
        "simulated, 100 MB/s between hosts": None,
        AT_125: pytest.approx(800),
        "emulated (namespaces), 125 MB/s between hosts": pytest.approx(900),
    }
    assert cell(found["simulated, 100 MB/s between hosts"], "speedup", "7", "exact").missing


def refused(network: str, resolution: int) -> Row:
    """As task=train_if_fits leaves what does not fit."""
    row = fitting8(network, resolution, fits=False, limited_by="over_budget")
    lacks = ("train/accuracy", "test/accuracy", "step_memory_bytes", "inference_shapes_per_s")
    return {key: item for key, item in row.items() if key not in lacks}


def fitting8(network: str, resolution: int, **more: Any) -> Row:
    told = {
        "fits": True,
        "inference_shapes_per_s": 50.0,
        "step_memory_bytes": 500_000_000,
        "budget_bytes": 2_000_000_000,
        **more,
    }
    return training(network, resolution, name="fig8", task="train_if_fits", **told)


def test_fig8_has_figures_of_the_paper_where_table2_has() -> None:
    (block,) = FIG8.blocks([fitting8("sparse", 50), fitting8("sparse", 200)])
    found = cell(block, "test_accuracy", "50³", "sparse")
    assert found.paper is not None
    assert found.paper.text == "87.61"
    assert "Table II" in found.paper.derived
    assert cell(block, "test_accuracy", "200³", "sparse").paper is None
    assert value(block, "test_accuracy", "200³", "sparse") == pytest.approx(85)
    assert value(block, "inference_rate", "50³", "sparse") == 50
    assert value(block, "memory", "50³", "sparse") == pytest.approx(500)


def test_what_does_not_fit_is_no_missing_cell() -> None:
    (block,) = FIG8.blocks([fitting8("dense", 50), refused("dense", 100)])
    found = cell(block, "test_accuracy", "100³", "dense")
    assert not found.missing
    assert found.ours is not None
    assert found.ours.value == "does not fit"
    assert found.ours.note == (
        "a training step of 16 shapes does not fit: over budget, the budget is 2,000 MB"
    )
    assert value(block, "memory", "100³", "dense") == "over 2,000"
    assert cell(block, "memory", "200³", "dense").missing
    assert block.sweep == "sparsepipe -m experiment=fig8 scale=desk"


def test_a_mean_says_which_seeds_did_not_fit() -> None:
    there = [fitting8("dense", 100, seed=seed, test=0.8) for seed in (0, 1)]
    (block,) = FIG8.blocks([*there, {**refused("dense", 100), "seed": 2, "run_id": "large"}])
    for column in ("test_accuracy", "memory"):
        found = cell(block, column, "100³", "dense").ours
        assert found is not None
        assert found.count == 2
        assert found.note == (
            "without large: a training step of 16 shapes does not fit: over budget, the budget is "
            "2,000 MB"
        )
    (block,) = FIG8.blocks(there)
    assert not [each for each in block.cells if each.ours and each.ours.note]


def test_table3_sets_words_beside_words() -> None:
    told = {
        "8gpu/HETE-MP/config": "7-1",
        "8gpu/HETE-MP/devices": "3 x TITAN Xp + 4 x RTX 2080 Ti, 1 x TITAN V",
        "8gpu/HETE-MP/bottleneck_ms": 388.47,
        "8gpu/HETE-MP/paper_bottleneck_ms": 388.4712,
        "8gpu/HETE-MP/verdict": "equal",
        "task.bandwidth_bytes_per_s": 60e6,
        "task.mp_cost_model": "sparsepipe_mp",
        "task.hete_cost_model": "sparsepipe_hete",
        "task.order": "by_count",
    }
    (block,) = TABLE3.blocks([run("table3", "table3", kind="simulated", **told)])
    split = cell(block, "split", "8", "HETE-MP")
    assert split.ours is not None
    assert split.paper is not None
    assert (split.paper.text, split.ours.value, split.ours.note) == ("7-1", "7-1", "equal")
    devices = cell(block, "devices", "8", "HETE-MP").paper
    assert devices is not None
    assert devices.text == "4 RTX + 3 TitanXP, 1 TitanV"
    bottleneck = cell(block, "bottleneck", "8", "HETE-MP")
    assert bottleneck.paper is not None
    assert bottleneck.paper.text == "388.5"
    assert "not printed" in bottleneck.paper.derived
    assert cell(block, "split", "5", "MP").missing
    assert block.title.startswith("60 MB/s between all GPUs")


def test_table1_has_a_row_for_what_is_none_of_the_papers() -> None:
    speeds = {"flops_per_s": 9.1e12, "copied_bytes_per_s": 3e11, "memory_bytes": 11e9}
    (block,) = TABLE1.blocks(
        [
            run("table1", "table1", measured_device="Xeon", **speeds),
            run("table1", "table1", measured_device="NVIDIA GeForce RTX 2080 Ti", **speeds),
        ]
    )
    theirs = ("RTX 2080 Ti", "server 2, 4 of them")
    assert value(block, "tflops", *theirs) == pytest.approx(9.1)
    assert cell(block, "bandwidth", *theirs).compared == pytest.approx(300 / 352)
    assert value(block, "memory", "Xeon", "measured here") == pytest.approx(11)
    assert cell(block, "tflops", "Xeon", "measured here").paper is None
    assert not any(each.missing for each in block.cells), "GPUs of the paper are not here"


def test_fig7_shares_are_of_the_layers_so_far() -> None:
    costs = {
        "layers_compute_s": [3.0] * 26 + [1.0] * 26,
        "layers_activation_bytes": [1] * 52,
        "layers_parameter_bytes": [0] * 51 + [7],
    }
    row = run("profile", "fig7", **{"data.resolution": 50, "data.batch_size": 8, **costs})
    (block,) = FIG7.blocks([row])
    assert value(block, "compute_share", "0 to 33") == pytest.approx(100 * (78 + 8) / 104)
    assert value(block, "activation_share", "0 to 6") == pytest.approx(100 * 7 / 52)
    assert value(block, "parameter_share", "0 to 43") == 0
    assert [row[0] for row in block.rows] == [
        f"0 to {paper['last_layer']}" for paper in printed("fig7")
    ]
    (block,) = FIG7.blocks([run("profile", "fig7", layers_compute_s=[1.0] * 9)])
    assert all(each.missing for each in block.cells)
