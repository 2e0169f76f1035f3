"""The commands that a report names are commands."""

from __future__ import annotations

import shlex
from itertools import dropwhile

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from sparsepipe.config import compose
from sparsepipe.paper.chapters import CHAPTERS
from sparsepipe.report.commands import Commands
from sparsepipe.report.overrides import composed_values
from tests.support.command_line import composed

_TRIED = 4
"""Of each table or figure: its commands differ in a few overrides."""


@pytest.mark.parametrize("name", CHAPTERS)
def test_commands_that_fill_cells_compose(name: str) -> None:
    cells = [cell for block in CHAPTERS[name].blocks([]) for cell in block.cells]
    commands = list(dict.fromkeys(cell.command for cell in cells if cell.command))
    for command in commands[:: max(1, len(commands) // _TRIED)]:
        words = shlex.split(command)
        program, *overrides = dropwhile(lambda word: "=" in word, words)  # of the environment
        assert program == "sparsepipe"
        assert composed(*overrides).name == name


@pytest.mark.parametrize("network", ["dense", "sparse"])
@pytest.mark.parametrize("resolution", [32, 200])
def test_a_command_of_fig8_is_that_of_its_cell(network: str, resolution: int) -> None:
    (block,) = CHAPTERS["fig8"].blocks([])
    cells = block.rows[f"{resolution}³", network].values()
    (command,) = {cell.command for cell in cells}
    config = composed(*shlex.split(command)[1:])
    assert config.representation == network
    assert config.data.get("resolution") == resolution


@pytest.mark.parametrize("scales", [(), ("desk",)])
@pytest.mark.parametrize(("name", "count"), [("table2", 24), ("fig8", 8)])
def test_commands_of_cells_without_runs_are_jobs_of_their_sweep(
    name: str, count: int, scales: tuple[str, ...]
) -> None:
    (block,) = CHAPTERS[name].blocks(
        [], Commands(experiment=name, scales=scales, composed=composed_values)
    )
    swept = jobs_of(shlex.split(block.sweep)[1:])
    alone = {frozenset(shlex.split(cell.command)[1:]) for cell in block.cells}
    assert alone == swept
    assert len(swept) == count


@pytest.mark.parametrize(("name", "scale"), [("fig7", "smoke"), ("table1", "desk")])
def test_a_cell_of_a_single_run_without_runs_has_a_scale_in_its_command(
    name: str, scale: str
) -> None:
    (block,) = CHAPTERS[name].blocks([], Commands(experiment=name, composed=composed_values))
    (command,) = {cell.command for cell in block.cells if cell.command}
    assert command == f"sparsepipe experiment={name} scale={scale}"
    assert composed(*shlex.split(command)[1:]).scale == scale


def jobs_of(words: list[str]) -> set[frozenset[str]]:
    """Overrides of each job that a command of a sweep makes."""
    asked = [word for word in words if word != "-m"]
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        config = hydra_compose("config", asked, return_hydra_config=True)
    params = [f"{key}={value}" for key, value in config.hydra.sweeper.params.items()]
    parsed = OverridesParser.create().parse_overrides([*params, *compose.admit(asked)])
    (batch,) = BasicSweeper.split_arguments(parsed, None)
    return {frozenset(word.lstrip("+") for word in job) for job in batch}


def test_commands_of_table2_are_those_of_their_cells() -> None:
    (block,) = CHAPTERS["table2"].blocks([])
    cells = block.rows["50³", "4", "sparse", "0.25"]
    commands = {column.key: cell.command for column, cell in cells.items()}
    config = composed(*shlex.split(commands["test_accuracy"])[1:])
    assert config.task.locate().name == "train"
    assert config.parallel.devices == 4
    assert config.parallel.strategy.path.endswith(".DataParallelStrategy")
    assert (config.representation, config.data.get("resolution")) == ("sparse", 50)
    assert config.data.get("point_ratio") == 0.25
    fitting = composed(*shlex.split(commands["batch"])[1:])
    assert fitting.task.locate().name == "fit_batch"
    assert fitting.data.get("point_ratio") == 0.25
