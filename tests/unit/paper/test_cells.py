"""Each job of the sweep that a chapter names comes into a cell of it, and fills all of them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from sparsepipe.config.run_spec import RunSpec
from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.paper.chapters.multi_dsn import _TARGETS
from sparsepipe.report.chapter import Block
from sparsepipe.runs.ledger_table import Row
from sparsepipe.tasks.measure_steps import outcome
from tests.support.command_line import composed
from tests.support.reported_runs import jobs_of, made_by

_LAYERS = ("layers_compute_s", "layers_activation_bytes", "layers_parameter_bytes")
FIGURES: dict[str, dict[str, Any]] = {
    "table1": {"measured_device": "Xeon", "flops_per_s": 1e11},
    "table2": {"train/accuracy": 0.9},
    "table3": {"5gpu/MP/config": "1-2"},
    "fig7": dict.fromkeys(_LAYERS, [1.0] * 52),
    "fig8": {"fits": True, "step_memory_bytes": 1e9},
    "fig9": {"minibatches_per_s": 2.0, "network": "namespaces"},
    "pipeline_depth": {"samples_per_s": 9.0, "kept_bytes": 1e6, "plan_config": "1-1"},
    "bigconv": outcome([{"size": [8, 8], "peak_bytes": 10**6, "fits": True, "limited_by": None}]),
}
FIGURES["convnext_tp"] = FIGURES["multi_dsn_memory"] = FIGURES["bigconv"]
TARGETS = {name for targets in _TARGETS.values() for name in targets}
FIGURES["multi_dsn"] = {f"test/{name}/accuracy": 0.5 for name in TARGETS}


def jobs(block: Block) -> list[frozenset[str]]:
    found = []
    for command in block.sweep.split(" && "):
        program, *words = shlex.split(command)
        assert program == "sparsepipe"
        found += sorted(jobs_of(words), key=sorted)
    return found


def left_by(name: str, job: frozenset[str], run_id: str, *more: str) -> Row:
    """The result of a job that has finished, as far as reports read it."""
    overrides = sorted(job, key=lambda word: (not word.startswith("experiment="), word))
    emulated = "task=paper/fig9_emulated" in job or any("depth=emulated" in word for word in job)
    kind = "simulated" if any("simulated" in word for word in job) else "measured"
    told = {**FIGURES[name], "kind": "emulated" if emulated else kind, "run_id": run_id}
    return made_by(*overrides, *more, **told)


SLOW = ("bigconv", "fig9", "multi_dsn", "pipeline_depth")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in FIGURES],
)
def test_jobs_fill_the_cells_of_their_sweep(name: str) -> None:
    empty = CHAPTERS[name].blocks([])
    found = dict.fromkeys(job for block in empty for job in jobs(block))
    rows = [left_by(name, job, str(number)) for number, job in enumerate(found)]
    filled = CHAPTERS[name].blocks(rows)
    assert {run["run_id"] for block in filled for run in block.runs} == {r["run_id"] for r in rows}
    assert not [note for block in filled for note in block.notes if "Left out" in note]
    if name in ("table2", "fig8", "fig9", "pipeline_depth"):
        there = {cell.row for block in filled for cell in block.cells if cell.ours is not None}
        assert there == {cell.row for block in empty for cell in block.cells}


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("table2", "data.batch_size=2"),
        ("fig8", "optim=adamw"),
        ("fig9", "parallel.search.cost_model=eq4"),
        ("pipeline_depth", "optim=adamw"),
        ("convnext_tp", "model.width=0.5"),
        ("multi_dsn", "optim.optimizer.lr=0.1"),
        ("fig7", "backend=native"),
    ],
)
def test_a_run_with_another_override_has_a_table_of_its_own(name: str, override: str) -> None:
    job = jobs(CHAPTERS[name].blocks([])[0])[0]
    rows = [left_by(name, job, "usual"), left_by(name, job, "other", override)]
    blocks = CHAPTERS[name].blocks(rows)
    apart = [block for block in blocks if any(run["run_id"] == "other" for run in block.runs)]
    assert apart
    for block in apart:
        assert override in block.title
        assert not any(run["run_id"] == "usual" for run in block.runs)
    assert any(run["run_id"] == "usual" for block in blocks for run in block.runs)


def test_a_run_that_satisfies_an_override_by_itself_is_in_that_table_too() -> None:
    """One device takes 2 shapes anyway, as four do with the override."""
    device = frozenset({"experiment=table2", "scale=smoke", "paper/trial=one_device"})
    four = frozenset({"experiment=table2", "scale=smoke", "paper/trial=four_devices"})
    one = left_by("table2", device, "one")
    shared = left_by("table2", four, "four", f"data.batch_size={one['data.batch_size']}")
    blocks = CHAPTERS["table2"].blocks([one, shared])
    runs = [{run["run_id"] for run in block.runs} for block in blocks]
    assert sorted(map(sorted, runs)) == [["four", "one"], ["one"]]


def test_runs_without_a_cell_are_named() -> None:
    job = frozenset({"experiment=table2", "scale=smoke"})
    unstamped = {k: v for k, v in left_by("table2", job, "old").items() if "study" not in k}
    elsewhere = left_by("table2", job, "odd", "data.resolution=77")
    begun = {**left_by("table2", job, "begun"), "first_weights": "a/last.ckpt"}
    lost = {**left_by("table2", job, "lost"), "nonfinite": "the loss is nan"}
    first, *_ = CHAPTERS["table2"].blocks(
        [unstamped, elsewhere, begun, lost, left_by("table2", job, "a")]
    )
    assert first.notes[-1] == "Left out: old, odd, begun, lost, which fill no cell of this chapter."


def test_cells_do_not_change_the_run() -> None:
    plain = composed("experiment=table2", "scale=smoke")
    values = plain.to_dict()
    assert values.pop("study")["exhibit"] == "table2"
    assert RunSpec.from_dict(values).identity() == plain.identity()
