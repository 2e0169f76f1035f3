"""Figures of Fig. 9 beside its speedups, against ones computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sparsepipe.paper.chapters.fig9 import FIG9
from sparsepipe.paper.chapters.fig9 import PRINTED as PAPER
from sparsepipe.report.chapter import Row
from tests.support.report_cases import MODULE, cell, run, value
from tests.unit.paper.test_chapters import AT_125, GPUS, fig9, simulated

EMULATED = "emulated (namespaces), 125 MB/s between hosts"
COMMAND = "sparsepipe experiment=fig9"


def emulated(strategy: str, gpus: int, minibatch_s: float, **more: Any) -> Row:
    """As task=emulate leaves it."""
    way = {"dp": {"strategy._target_": MODULE}}.get(strategy, {"search.search": strategy})
    return run(
        "train_emulated",
        "fig9",
        **{
            **{f"parallel.{key}": item for key, item in way.items()},
            "kind": "emulated",
            "network": "namespaces",
            "time_scale": 2.5,
            "link_bytes_per_s": 125e6,
            "hardware_devices": GPUS[gpus],
            "minibatches_per_s": 1 / minibatch_s,
            **more,
        },
    )


def test_speedups_over_dp_that_sums_after_the_backward() -> None:
    """Simulations tell it; nobody has emulated it."""
    told = {"dp_minibatch_s": 0.8, "dp_without_overlap_minibatch_s": 0.96}
    found = fig9(
        simulated("dp", 5, 0.8, **told), simulated("hete_mp", 5, 0.32, **told),
        simulated("hete_mp", 8, 0.32), emulated("hete_mp", 5, 0.35),
    )  # fmt: skip
    block = found[AT_125]
    assert value(block, "speedup_without_overlap", "5", "HETE-MP") == pytest.approx(3)
    assert value(block, "speedup_without_overlap", "5", "DP") == pytest.approx(1.2)
    untold = cell(block, "speedup_without_overlap", "8", "HETE-MP")
    assert (untold.ours, untold.missing) == (None, False), "the run is there"
    assert "speedup_without_overlap" not in {column.key for column in found[EMULATED].columns}


def test_the_picture_has_frames_for_them() -> None:
    told = {"dp_minibatch_s": 0.8, "dp_without_overlap_minibatch_s": 0.96}
    (block,) = [each for each in FIG9.blocks([simulated("exact", 5, 0.2, **told)]) if each.runs]
    assert FIG9.draw is not None
    figure = FIG9.draw(block)
    assert figure is not None
    (legend,) = figure.legends
    assert "over DP without overlap" in {text.get_text() for text in legend.get_texts()}


def test_over_hete_mp() -> None:
    runs = [simulated("exact", 5, 0.25), simulated("dp", 5, 0.8), simulated("paper_mp", 8, 0.4)]
    whole = fig9(*runs, simulated("hete_mp", 5, 0.3), simulated("hete_mp", 5, 0.34, seed=1))[AT_125]
    assert value(whole, "over_hete_mp", "5", "exact") == pytest.approx(1.28), "the mean of both"
    assert len(cell(whole, "over_hete_mp", "5", "exact").ours.runs) == 3
    assert value(whole, "over_hete_mp", "5", "DP") == pytest.approx(0.4)
    lacking = cell(whole, "over_hete_mp", "8", "MP, the paper's split")
    task = "task=paper/fig9_simulated_125 hardware=paper_8gpu"
    assert lacking.command == f"{COMMAND} {task} parallel=hete_mp", "which is what it lacks"
    assert lacking.missing


def test_what_a_speedup_lacks_is_data_parallelism() -> None:
    block = fig9(simulated("exact", 5, 0.25))[AT_125]
    task = "task=paper/fig9_simulated_125 hardware=paper_5gpu"
    assert cell(block, "speedup", "5", "exact").command == f"{COMMAND} {task} parallel=dp"
    assert cell(block, "speedup", "5", "MP").command == f"{COMMAND} {task} parallel=mp"


def test_emulations_are_beside_simulations_over_the_same_link() -> None:
    found = fig9(
        simulated("hete_mp", 5, 0.32),
        simulated("hete_mp", 5, 9.0, **{"task.link_bytes_per_s": 50e6}),
        emulated("hete_mp", 5, 0.35),
        emulated("dp", 5, 0.8),
    )
    off = cell(found[EMULATED], "off_simulation", "5", "HETE-MP")
    assert off.ours.value == pytest.approx(100 * (0.32 / 0.35 - 1))
    assert off.column.text(off.ours.value) == "-8.6"
    assert {run["kind"] for run in off.ours.runs} == {"simulated", "emulated"}
    lacking = cell(found[EMULATED], "off_simulation", "5", "DP")
    task = "task=paper/fig9_simulated_125 hardware=paper_5gpu"
    assert (lacking.missing, lacking.command) == (True, f"{COMMAND} {task} parallel=dp")
    assert "off_simulation" not in {column.key for column in found[AT_125].columns}


def test_several_emulations_are_off_by_their_mean_and_spread() -> None:
    rows = [simulated("dp", 5, 0.8), emulated("dp", 5, 1.0), emulated("dp", 5, 0.8, seed=1)]
    ours = cell(fig9(*rows)[EMULATED], "off_simulation", "5", "DP").ours
    assert ours.value == pytest.approx(-10)
    assert ours.spread == pytest.approx((-20, 0))


def test_links_without_limit_are_beside_no_simulation_and_a_note_says_what_to_do() -> None:
    unlimited = "emulated (loopback), links not limited"
    found = fig9(simulated("dp", 5, 0.8), emulated("dp", 5, 0.7, network="loopback"))
    assert "off_simulation" not in {column.key for column in found[unlimited].columns}
    (note,) = found[EMULATED].notes
    assert note.startswith("There are such runs on loopback")
    assert note.endswith("as root, who may make namespaces, the same command skips what is "
                         "finished; give it force=true.")  # fmt: skip
    assert fig9(simulated("dp", 5, 0.8))[EMULATED].notes == ()
    both = fig9(emulated("dp", 5, 0.7, network="loopback"), emulated("dp", 5, 0.8))
    assert both[EMULATED].notes == ()


def test_time_scales_are_shown_and_their_paces_compared() -> None:
    block = fig9(emulated("dp", 5, 0.84), emulated("exact", 5, 0.21, time_scale=10.0))[EMULATED]
    assert value(block, "speedup", "5", "exact") == pytest.approx(4)
    scales = [value(block, "time_scale", "5", name) for name in ("DP", "exact", "MP")]
    assert scales == ["2.5", "10", None]
    assert "time_scale" not in {column.key for column in fig9()[AT_125].columns}


def test_what_the_paper_prints_is_of_its_own_strategies() -> None:
    values = {place: (each.value, each.derived) for place, each in PAPER.items()}
    assert values == {
        (5, "paper_mp"): (2.03, False),
        (5, "hete_mp"): (3.11, False),
        (6, "paper_mp"): (2.27, False),
        (8, "paper_mp"): (1.33, False),
        (8, "hete_mp"): (2.63, True),
    }
    assert round(1.98 * 1.33, 2) == PAPER[8, "hete_mp"].value
