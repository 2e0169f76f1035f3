"""What a sweep without a finished run was asked for, and the commands that its report prints."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.paper.report_sweep import requests_of
from sparsepipe.report.chapter import Block
from sparsepipe.report.commands import Commands, Request
from sparsepipe.report.overrides import composed_values
from sparsepipe.sweep.record import JobRecord
from tests.support.command_line import composed
from tests.support.reported_runs import made_by
from tests.support.sweep_cases import leave_record

TABLE2 = ("scale", "paper/trial", "++data.resolution", "paper/network")
FIG9 = ("task", "hardware", "parallel")
CELL = ("paper/trial=one_device", "++data.resolution=32", "paper/network=dense")
POINTS = ("data=modelnet40_points", "data.root=here/points")


def jobs(
    tmp_path: Path, *overrides: Sequence[str], finished: Sequence[int] = ()
) -> list[JobRecord]:
    return [
        leave_record(tmp_path, number, *each, run=tmp_path if number in finished else None)
        for number, each in enumerate(overrides)
    ]


def test_overrides_that_cells_do_not_imply_are_requested(tmp_path: Path) -> None:
    job = ("experiment=table2", "scale=desk", *CELL, *POINTS, "++data.batch_size=8")
    places = ("logger=wandb", "paths.outputs=there", "hydra.launcher.max_jobs=1", "tags=[a]")
    found = requests_of(jobs(tmp_path, (*job, *places), (*job, "force=true", "name=mine")), TABLE2)
    assert found == [Request(scale="desk", overrides=(*POINTS, "data.batch_size=8"))]
    assert found[0].title == "scale desk; data=modelnet40_points; data.batch_size=8"


def test_overrides_of_a_finished_job_are_not_requested(tmp_path: Path) -> None:
    widths = [("scale=desk", *CELL, f"++model.width={width}") for width in (0.5, 0.25, 0.5, 0.25)]
    found = requests_of(jobs(tmp_path, *widths, finished=[3]), TABLE2)
    assert found == [Request(scale="desk", overrides=("model.width=0.5",))]


def test_seeds_are_those_of_all_jobs(tmp_path: Path) -> None:
    seeds = [("scale=desk", f"seed={seed}", cell) for seed in (0, 1) for cell in CELL]
    (found,) = requests_of(jobs(tmp_path, *seeds), TABLE2)
    assert found == Request(scale="desk", overrides=(), seeds="seed=0,1")
    assert found.given == ("scale=desk", "seed=0,1")


def test_overrides_that_name_a_cell_are_dropped_and_others_kept(tmp_path: Path) -> None:
    words = ("data.batch_size=8", "parallel=dp", "++optim.optimizer.lr=0.1")
    (found,) = requests_of(jobs(tmp_path, ("scale=desk", *CELL, *words)), TABLE2)
    assert found.overrides == ("data.batch_size=8", "optim.optimizer.lr=0.1")


@pytest.mark.parametrize(
    "word", ["model=sparse_vgg19_bn", "++data.point_ratio=0.1", "parallel=dp", "task=evaluate"]
)
def test_runs_of_no_cell_are_one_request(tmp_path: Path, word: str) -> None:
    found = requests_of(jobs(tmp_path, ("scale=desk", *CELL, word, "seed=3")), TABLE2)
    assert found == [Request(scale="desk", seeds="seed=3")]


def test_what_not_every_cell_takes_is_apart(tmp_path: Path) -> None:
    words = ("++task.budget_bytes=1e9", "++parallel.grace_s=5")
    (found,) = requests_of(jobs(tmp_path, ("scale=desk", *CELL, *words)), TABLE2)
    assert found == Request(scale="desk", overrides=(), of_task=("task.budget_bytes=1e9",))
    (of_fig8,) = requests_of(jobs(tmp_path / "b", words), ("scale", "paper/network"))
    assert of_fig8.overrides == ("task.budget_bytes=1e9", "parallel.grace_s=5")


def test_a_search_with_many_settings_wants_none(tmp_path: Path) -> None:
    many = [("scale=desk", f"++optim.optimizer.lr={number}") for number in range(1, 10)]
    assert requests_of(jobs(tmp_path, *many), TABLE2) == []
    assert len(requests_of(jobs(tmp_path / "fewer", *many[:8]), TABLE2)) == 8


def blocks(name: str, *wanted: Request, rows: Sequence[dict[str, object]] = ()) -> list[Block]:
    scales = tuple(each.scale for each in wanted if each.scale)
    commands = Commands(experiment=name, scales=scales, requests=wanted, composed=composed_values)
    return list(CHAPTERS[name].blocks(rows, commands))


SMALL = Request(
    scale="smoke", overrides=("data=modelnet40_points", "data.root=here", "data.batch_size=2")
)


@pytest.mark.parametrize("name", ["table2", pytest.param("fig8", marks=pytest.mark.full)])
def test_runs_of_the_commands_fill_the_cells_they_stand_at(name: str) -> None:
    (empty,) = blocks(name, SMALL)
    assert empty.title == "scale smoke; data=modelnet40_points; data.batch_size=2"
    cells = empty.cells[:: len(empty.cells) // 3]
    rows = [left_by(cell.command, run_id=str(number)) for number, cell in enumerate(cells)]
    (found,) = blocks(name, SMALL, rows=rows)
    assert {run["run_id"] for run in found.runs} == {row["run_id"] for row in rows}
    assert {cell.row for cell in found.cells if cell.ours} >= {cell.row for cell in cells}
    assert "data.batch_size=2" in found.title
    assert words(empty.sweep)[:2] == ["-m", f"experiment={name}"]
    assert set(SMALL.overrides or ()) <= set(words(empty.sweep))


def words(command: str) -> list[str]:
    program, *rest = dropwhile(lambda word: word.startswith("OMP_"), shlex.split(command))
    assert program == "sparsepipe"
    return rest


def left_by(command: str, **figures: object) -> dict[str, object]:
    """A result of it, which does not say where data were."""
    placed = [word for word in words(command) if not word.startswith("data.root=")]
    return made_by(*placed, **figures)


def test_runs_with_other_overrides_leave_a_sweeps_own_untold() -> None:
    usually = made_by(
        *("experiment=table2", "scale=smoke", "paper/trial=one_device", "paper/network=sparse"),
        run_id="a",
    )
    there, wanted = blocks("table2", SMALL, rows=[usually])
    assert [run["run_id"] for run in there.runs] == ["a"]
    assert (wanted.runs, wanted.title) == ([], SMALL.title)
    (plain,) = blocks("table2", Request(scale="smoke", overrides=()), rows=[usually])
    assert plain.title == there.title
    (any_will_do,) = blocks("table2", Request(scale="smoke"), rows=[usually])
    assert any_will_do.title == there.title


def test_data_at_several_places_are_a_table_each() -> None:
    here, there = (("data=modelnet40_points", f"data.root={place}") for place in ("here", "there"))
    asked = [Request(scale="smoke", overrides=words) for words in (here, there)]
    found = blocks("fig8", *asked)
    assert [block.title for block in found] == [
        f"scale smoke; data=modelnet40_points; data.root={place}" for place in ("here", "there")
    ]
    for block, (_, root) in zip(found, (here, there), strict=True):
        assert all(root in words(cell.command) for cell in block.cells)


def test_several_seeds_are_a_sweep_of_their_cell() -> None:
    (found,) = blocks("fig8", Request(scale="smoke", overrides=(), seeds="seed=0,1"))
    start = "sparsepipe -m experiment=fig8 scale=smoke seed=0,1"
    assert found.cells[0].command == f"{start} paper/network=dense data.resolution=32"
    assert found.sweep == start
    (one,) = blocks("fig8", Request(scale="smoke", overrides=(), seeds="seed=7"))
    assert composed(*words(one.cells[0].command)).to_dict()["seed"] == 7


def test_searches_of_table2_have_the_budget_and_trainings_have_not() -> None:
    asked = Request(
        scale="smoke", overrides=(), of_task=("task.budget_bytes=1e9", "task.gallery=2")
    )
    (found,) = blocks("table2", asked)
    told = {
        cell.column.key: cell.command for cell in found.rows["50³", "1", "sparse", "1"].values()
    }
    assert "task." not in told["test_accuracy"]
    assert composed(*words(told["batch"])).to_dict()["task"]["budget_bytes"] == 1e9
    assert "task.gallery" not in told["batch"]
    trainings, searches = found.sweep.split(" && ")
    assert "task." not in trainings
    assert searches.endswith("paper/trial=largest_batch task.budget_bytes=1e9")


def test_groups_of_fig9_have_overrides_that_count(tmp_path: Path) -> None:
    job = ("task=paper/fig9_simulated_50", "hardware=paper_5gpu", "parallel=exact")
    more = ("++parallel.search.cost_model=eq4", "++data.batch_size=8")
    wanted = requests_of(jobs(tmp_path, ("experiment=fig9", *job, *more)), FIG9)
    found = blocks("fig9", *wanted)
    usually, apart = found[::2], found[1::2]
    assert len(usually) == len(apart) == 4
    for plain, other in zip(usually, apart, strict=True):
        assert other.title == f"{plain.title}; parallel.search.cost_model=eq4"
        assert "batch_size" not in other.sweep
    command = words(apart[0].rows["5", "exact"][apart[0].columns[0]].command)
    assert composed(*command).to_dict()["task"]["parallel"]["search"]["cost_model"] == "eq4"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("table3", "task.bandwidth_bytes_per_s=5e7"),
        ("fig7", "data.batch_size=2"),
        ("pipeline_depth", "data.batch_size=256"),
    ],
)
def test_commands_of_other_tables_have_the_overrides_too(name: str, word: str) -> None:
    scale = "smoke" if name == "fig7" else None
    (found,) = blocks(name, Request(scale=scale, overrides=(word,)))
    assert found.title == (f"scale smoke; {word}" if scale else word)
    assert all(word in shlex.split(cell.command) for cell in found.cells if cell.command)
    command = words(found.cells[-1].command)
    key, _, value = word.partition("=")
    group, _, leaf = key.partition(".")
    assert composed(*command).to_dict()[group][leaf] == float(value)


def one_run(name: str, *overrides: str) -> dict[str, object]:
    """A finished run of it, as the sweep makes it without overrides."""
    figures: dict[str, dict[str, object]] = {
        "table1": {"measured_device": "Xeon", "flops_per_s": 1e11},
        "table3": {"8gpu/HETE-MP/config": "7-1"},
        "pipeline_depth": {"strategy": "single"},
    }
    return made_by(f"experiment={name}", *overrides, run_id="there", **figures[name])


@pytest.mark.parametrize(
    ("name", "scale", "word"),
    [
        ("table1", "smoke", "task.matrix_size=77"),
        ("table3", None, "task.bandwidth_bytes_per_s=5e7"),
        ("pipeline_depth", None, "data.batch_size=256"),
    ],
)
def test_runs_of_other_tables_leave_other_overrides_untold(
    name: str, scale: str | None, word: str
) -> None:
    row = one_run(name, *((f"scale={scale}",) if scale else ()))
    there, asked = blocks(name, Request(scale=scale, overrides=(word,)), rows=[row])
    assert [run["run_id"] for run in there.runs] == ["there"]
    assert (asked.runs, asked.title) == ([], f"scale {scale}; {word}" if scale else word)
    assert all(word in words(cell.command) for cell in asked.cells if cell.command)
    (plain,) = blocks(name, Request(scale=scale, overrides=()), rows=[row])
    assert plain.title == there.title


def test_a_run_of_table3_has_the_command_of_its_bandwidth() -> None:
    word = "task.bandwidth_bytes_per_s=50000000"
    asked = Request(scale=None, overrides=(word,))
    (found,) = blocks("table3", asked, rows=[one_run("table3", word)])
    assert {words(cell.command)[-1] for cell in found.cells} == {word}


def test_other_microbatches_leave_the_usual_study_untold() -> None:
    row = {**one_run("pipeline_depth"), "parallel.strategy.microbatches": 8}
    there, asked = blocks("pipeline_depth", Request(scale=None, overrides=()), rows=[row])
    assert there.title.endswith("T = 8")
    assert (asked.runs, asked.title.endswith("T = 32")) == ([], True)


def test_what_was_refused_is_no_command(tmp_path: Path) -> None:
    words = ("scale=desk", "data=shape")
    refused = leave_record(tmp_path, 0, *words, run=None, exit_code=ConfigError.exit_code)
    assert requests_of([refused], TABLE2) == []
