"""The commands that a report prints: their runs come into the table that lacks them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.report.chapter import Block, Chapter, Row
from sparsepipe.report.commands import Commands
from tests.support.desk_cases import MADE, as_desk
from tests.support.report_cases import run, training


def block(*rows: Row, **more: Any) -> Block:
    (found,) = CHAPTERS["table2"].blocks(rows, Commands(experiment="table2", **more))
    return found


def commands(found: Block) -> set[str]:
    return {each.command for each in found.cells if each.command} | {found.sweep}


@pytest.mark.parametrize("exhibit", CHAPTERS.values(), ids=lambda each: each.name)
def test_all_have_the_name_that_runs_were_given(exhibit: Chapter) -> None:
    blocks = exhibit.blocks([], Commands(experiment=exhibit.name, name="mine"))
    found = {each.command for each in (cell for block in blocks for cell in block.cells)}
    found |= {block.sweep for block in blocks}
    found -= {""}
    assert found
    for command in found:
        words = shlex.split(command)
        place = words.index(f"experiment={exhibit.name}")
        assert words[place + 1] == "name=mine"


def test_a_setting_that_the_scale_would_not_give_is_in_the_command() -> None:
    usual = block(training("dense", 32, **MADE), composed=as_desk)
    assert usual.sweep == "sparsepipe -m experiment=table2 scale=desk"
    changed = {
        "data.num_points": None,
        "data.source.train_per_class": 1,
        "model.width": 0.125,
        "trainer.max_epochs": 7,
        "trainer.limit_train_batches": 4.0,  # as a ledger has it beside shares
    }
    other = block(training("dense", 32, **{**MADE, **changed}), composed=as_desk)
    given = (
        "scale=desk data.num_points=null data.source.train_per_class=1 model.width=0.125 "
        "trainer.max_epochs=7 trainer.limit_train_batches=4"
    )
    assert other.sweep == f"sparsepipe -m experiment=table2 {given}"
    assert all(given in command for command in commands(other))


def test_a_share_of_an_epoch_stays_a_share() -> None:
    row = training("dense", 32, **{**MADE, "trainer.limit_train_batches": 1.0})
    assert block(row, composed=as_desk).sweep.endswith("trainer.limit_train_batches=1.0")


def test_what_nobody_knows_is_left_out() -> None:
    row = training("dense", 32, **{**MADE, "model.width": 0.125})
    assert "width" not in block(row).sweep
    assert "width" not in block(row, composed=lambda overrides, keys: {}).sweep


def test_other_data_have_a_directory_that_the_shell_fills_in() -> None:
    source = {"data.source._target_": "sparsepipe.data.sources.NpzBundle"}
    found = block(training("dense", 32, **source))
    root = 'scale=desk data=modelnet40_points "data.root=$MODELNET40_POINTS"'
    assert all(root in command for command in commands(found))
    for command in commands(found):
        printed = f"sparsepipe() {{ printf '%s\\n' \"$@\"; }}; {command}"
        said = subprocess.run(
            ["sh", "-c", printed],
            env={"MODELNET40_POINTS": "/data/CAD shapes"},
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        assert "data.root=/data/CAD shapes" in said.stdout.splitlines()
    (note,) = [note for note in found.notes if note.startswith("In commands $MODELNET40_POINTS ")]
    assert note.endswith(": first export MODELNET40_POINTS=DIRECTORY.")


def test_fewer_threads_than_cores_are_in_the_command() -> None:
    found = block(training("dense", 32, machine_cores=4, threads_per_rank=1))
    assert all(command.startswith("OMP_NUM_THREADS=1 sparsepipe ") for command in commands(found))
    whole = block(training("dense", 32, machine_cores=4))
    assert not any("OMP" in command for command in commands(whole))


@pytest.mark.parametrize("name", ["table2", "fig8", "fig7"])
def test_without_runs_commands_have_the_requested_scale(name: str) -> None:
    (found,) = CHAPTERS[name].blocks([], Commands(experiment=name, scales=("desk",)))
    assert all(f"experiment={name} scale=desk" in each.command for each in found.cells)


@pytest.mark.parametrize("name", ["table2", "fig8", "fig7", "table1"])
def test_without_runs_commands_have_the_scale_at_which_all_is_swept(name: str) -> None:
    def usual(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
        assert overrides == (f"experiment={name}",)
        return dict.fromkeys(keys, "smoke")

    (found,) = CHAPTERS[name].blocks([], Commands(experiment=name, composed=usual))
    told = {each.command for each in found.cells if each.command} | {found.sweep} - {""}
    assert all(f"experiment={name} scale=smoke" in command for command in told)


@pytest.mark.parametrize("name", ["table2", "fig8", "fig7", "table1"])
def test_cells_of_a_scale_that_no_run_has_are_missing_beside_those_of_others(name: str) -> None:
    asked = Commands(experiment=name, scales=("smoke", "desk"))
    smoke, desk = CHAPTERS[name].blocks([small(name)], asked)
    assert smoke.runs
    assert (desk.title, desk.runs) == ("scale desk", [])
    missing = [each for each in desk.cells if each.missing]
    assert missing
    assert all(f"experiment={name} scale=desk" in each.command for each in missing)
    (alone,) = CHAPTERS[name].blocks([small(name)], Commands(experiment=name))
    assert alone.title == smoke.title, "where no scale is asked for those of the runs are told of"


def small(name: str) -> Row:
    """A run of an experiment at scale smoke."""
    if name in ("table2", "fig8"):
        task = "train" if name == "table2" else "train_if_fits"
        return training("sparse", 32, name=name, task=task, scale="smoke")
    speeds = {"measured_device": "Xeon", "flops_per_s": 1e11}
    costs = ("layers_compute_s", "layers_activation_bytes", "layers_parameter_bytes")
    told = speeds if name == "table1" else dict.fromkeys(costs, [1.0] * 52)
    return run("table1" if name == "table1" else "profile", name, scale="smoke", **told)
