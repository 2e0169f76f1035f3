"""Several experiments in one sweep."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.config.compose import config_loader
from sparsepipe.errors import ConfigError
from sparsepipe.sweep.refusals import refuse_several
from tests.support.command_line import Shell

MINE = {
    "lr": "# @package _global_\noptim:\n  optimizer:\n    lr: 0.5\n",
    "wide": "# @package _global_\nmodel:\n  width: 2\n",
    "grid": "# @package _global_\nhydra:\n  sweeper:\n    params:\n      seed: 0,1\n",
    "based": "# @package _global_\ndefaults:\n  - table2\n",
}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A directory of somebody's own experiments."""
    (tmp_path / "experiment").mkdir()
    for name, text in MINE.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("swept", "own", "names"),
    [
        ("experiment=table2,fig8", "table2, fig8", ["table2", "fig8"]),
        ("+experiment=choice(demo,lr)", "demo", ["demo", "lr"]),
        ("experiment=lr,grid", "grid", ["lr", "grid"]),
        ("experiment=wide,based", "based", ["wide", "based"]),
        ("experiment=glob(*_local)", "hete_local", ["hete_local"]),
    ],
)
def test_those_that_say_how_they_are_swept_need_a_command_each(
    swept: str, own: str, names: list[str], mine: str
) -> None:
    words = ["-m", "--config-dir", mine, swept, "scale=smoke", "hydra.launcher.max_jobs=1"]
    with pytest.raises(ConfigError) as refused:
        refuse_several(words, config_loader([mine]))
    assert f"that {own} choose" in refused.value.message
    commands = [shlex.split(line) for line in refused.value.remedy.splitlines()[1:]]
    assert commands == [
        ["sparsepipe", "-m", "--config-dir", mine, f"experiment={name}", *words[4:]]
        for name in names
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "experiment=lr,wide"),
        ("-m", "experiment=table2"),
        ("-m", "experiment=demo,staleness", "hydra/launcher=sparsepipe"),
        ("-m", "experiment=table2,tabel3"),  # Hydra tells what there is
        ("-m", "experiment=table2,("),
        ("experiment=table2,fig8",),  # and that -m is missing
    ],
)
def test_others_are_left_to_hydra(words: tuple[str, ...], mine: str) -> None:
    refuse_several(words, config_loader([mine]))


@pytest.mark.full
def test_the_command_says_so_and_leaves_nothing(shell: Shell) -> None:
    words = shell.command("experiment=table2,fig8", "hydra.mode=MULTIRUN")
    words.remove("experiment=tiny")
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=shell.cwd, env=shell.environment, check=False, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "sparsepipe --config-dir" in ended.stderr
    assert not list(shell.cwd.iterdir())
