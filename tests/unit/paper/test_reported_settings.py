"""Tables of runs with and without overrides, composed as the command line does."""

from __future__ import annotations

import copy
import shlex
from typing import Any

import pytest

from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.report.chapter import Block
from sparsepipe.report.commands import Commands
from sparsepipe.report.overrides import composed_values
from tests.support.command_line import composed
from tests.support.reported_runs import made_by

GPUS = {
    5: "1 x TITAN V, 4 x RTX 2080 Ti",
    8: "1 x TITAN V, 3 x TITAN Xp, 4 x RTX 2080 Ti",
}
SMALL = ("experiment=table2", "scale=smoke", "paper/trial=one_device", "paper/network=sparse")


def commands(name: str, scale: str | None = None) -> Commands:
    return Commands(experiment=name, scales=(scale,) if scale else (), composed=composed_values)


def words(command: str) -> list[str]:
    return shlex.split(command)[1:]


@pytest.mark.parametrize(
    ("every", "scale"),
    [(9, "desk"), *(pytest.param(1, scale, marks=pytest.mark.full)
                    for scale in ("smoke", "desk", "paper"))],
)  # fmt: skip
@pytest.mark.parametrize("name", ["table2", "fig8"])
def test_what_commands_of_cells_give_is_in_one_table(name: str, scale: str, every: int) -> None:
    (empty,) = CHAPTERS[name].blocks([], commands(name, scale))
    told = list(dict.fromkeys(cell.command for cell in empty.cells))[::every]
    rows = [made_by(*words(each), run_id=str(number)) for number, each in enumerate(told)]
    (found,) = CHAPTERS[name].blocks(rows, commands(name, scale))
    assert len(found.runs) == len(told) > 0
    assert "=" not in found.title


def simulated(task: str, strategy: str, gpus: int, *overrides: str) -> dict[str, object]:
    command = ("experiment=fig9", f"task=paper/fig9_{task}", f"hardware=paper_{gpus}gpu")
    row = made_by(*command, f"parallel={strategy}", *overrides)
    kind = "emulated" if task == "emulated" else "simulated"
    return {**row, "hardware_devices": GPUS[gpus], "minibatches_per_s": 2.0, "kind": kind}


@pytest.mark.parametrize("strategy", ["dp", "mp", "paper_mp", "hete_mp", "exact"])
@pytest.mark.parametrize(
    ("task", "gpus"),
    [pytest.param("simulated_50", 8, marks=pytest.mark.full), ("simulated_125", 5)],
)
def test_bars_of_fig9_have_no_overrides(task: str, gpus: int, strategy: str) -> None:
    found = CHAPTERS["fig9"].blocks([simulated(task, strategy, gpus)], commands("fig9"))
    assert len(found) == 4
    assert [len(block.runs) for block in found].count(1) == 1


def test_emulated_bars_of_fig9_have_no_overrides() -> None:
    told = {"network": "namespaces", "link_bytes_per_s": 125e6}
    row = {**simulated("emulated", "hete_mp", 5), **told}
    found = CHAPTERS["fig9"].blocks([row], commands("fig9"))
    assert [len(block.runs) for block in found] == [0, 0, 0, 1]


@pytest.mark.full
def test_overrides_of_fig9_make_blocks_of_their_own() -> None:
    """Of data parallelism a search is none."""
    searched = ("parallel.search.cost_model=eq4", "parallel.search.bandwidth_bytes_per_s=null")
    rows = [
        {**simulated("simulated_125", "dp", 5), "run_id": "a"},
        {**simulated("simulated_125", "hete_mp", 5), "run_id": "b", "minibatches_per_s": 4.0},
        {**simulated("simulated_125", "hete_mp", 5, *searched), "run_id": "c"},
    ]
    usually, apart = [
        block for block in CHAPTERS["fig9"].blocks(rows, commands("fig9")) if block.runs
    ]
    assert {str(run["run_id"]) for run in usually.runs} == {"a", "b"}
    assert {str(run["run_id"]) for run in apart.runs} == {"a", "c"}
    assert set(searched) <= set(apart.title.split("; "))
    assert all(word in words(apart.sweep) for word in searched)
    assert composed(*words(apart.cells[0].command)).to_dict()["parallel"]["strategy"] is not None


@pytest.mark.parametrize("key", ["link", "memory", "profile", "count"])
def test_other_hosts_are_no_bars_of_fig9(key: str) -> None:
    """Although their GPUs are called the same."""
    usually = simulated("simulated_125", "hete_mp", 8)
    hosts: Any = copy.deepcopy(usually["hardware.value.hosts"])
    xp = hosts[0]["devices"][1]
    match key:
        case "link":
            hosts[1]["link"]["bytes_per_s"] = 1e9
        case "memory":
            xp["memory_bytes"] = 6e9
        case "profile":
            xp["profile"]["sparse_vgg16_bn"] = "mine/fast.json"
        case "count":  # moved to the other host
            xp["count"] = 2
            hosts[1]["devices"].append({**xp, "count": 1})
    other = {**usually, "hardware.value.hosts": hosts, "minibatches_per_s": 9.0, "run_id": "other"}
    found = CHAPTERS["fig9"].blocks([usually, other], commands("fig9"))
    assert [run["run_id"] for block in found for run in block.runs] == ["made"]
    (note,) = found[0].notes
    assert note.startswith("Left out: other")
    again = {**usually, "hardware.value.hosts": copy.deepcopy(usually["hardware.value.hosts"])}
    for host in again["hardware.value.hosts"]:
        for device in host["devices"]:  # wherever the package is
            device["profile"] = {name: f"/a/{file}" for name, file in device["profile"].items()}
    assert not CHAPTERS["fig9"].blocks([again], commands("fig9"))[0].notes


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.batch_size=8",),
        ("optim=adamw", "optim.optimizer.lr=0.1"),
        *(
            pytest.param(overrides, marks=pytest.mark.full)
            for overrides in (
                ("optim.optimizer.lr=0.1",),
                ("model.dropout=0.25", "data.augment.enabled=true"),
                ("trainer.precision=bf16-mixed",),
            )
        ),
        ("data.source.classes=[chair,table]",),
        ("model._target_=sparsepipe.models.sparse_vgg11_bn",),
    ],
)
def test_runs_with_overrides_have_a_table_whose_commands_repeat_them(
    overrides: tuple[str, ...],
) -> None:
    rows = [
        made_by(*SMALL, run_id="usual"),
        made_by(*SMALL, *overrides, run_id="other", **{"test/accuracy": 0.1}),
    ]
    usually, other = CHAPTERS["table2"].blocks(rows, commands("table2"))
    assert [run["run_id"] for run in usually.runs] == ["usual"]
    assert [run["run_id"] for run in other.runs] == ["other"]
    assert "=" not in usually.title
    told = {part for part in other.title.split("; ") if "=" in part}
    assert told == set(overrides)
    again = made_by(*words(lacking(other)))
    assert [again.get(key) for key in differing(*rows)] == [
        rows[1].get(key) for key in differing(*rows)
    ]


def differing(usual_row: dict[str, object], other: dict[str, object]) -> list[str]:
    keys = {key for key in (*usual_row, *other) if not key.startswith("hydra.")}
    return [key for key in keys if "." in key and usual_row.get(key) != other.get(key)]


def lacking(block: Block) -> str:
    """The command of the dense network beside the sparse one."""
    (cell,) = [
        each
        for each in block.cells
        if each.row == ("32³", "1", "dense", "1") and each.column.key == "test_accuracy"
    ]
    assert cell.missing
    return cell.command


def test_seeds_and_loaders_are_no_overrides() -> None:
    rows = [
        made_by(*SMALL, f"seed={seed}", "data.num_workers=0", run_id=str(seed)) for seed in (0, 1)
    ]
    (found,) = CHAPTERS["table2"].blocks(rows, commands("table2"))
    assert len(found.runs) == 2
    assert not [note for note in found.notes if "differ" in note]
    assert composed(*SMALL).flat()["data.seed"] == 0
