"""Several experiments in one sweep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparsepipe.config.compose import admit, config_loader
from sparsepipe.errors import ConfigError
from sparsepipe.sweep.composition import refuse_several, refuse_unknown_keys
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
    ("swept", "own"),
    [
        ("experiment=table2,fig8", "table2, fig8"),
        ("+experiment=choice(demo,lr)", "demo"),
        ("experiment=lr,grid", "grid"),
        ("experiment=wide,based", "based"),
        ("experiment=glob(*_local)", "hete_local"),
    ],
)
def test_those_that_say_how_they_are_swept_need_a_command_each(
    swept: str, own: str, mine: str
) -> None:
    words = [swept, "scale=smoke", "hydra.launcher.max_jobs=1"]
    with pytest.raises(ConfigError, match=f"swept values of {own} apply") as refused:
        refuse_several(words, config_loader(["--config-dir", mine]))
    assert "a separate command for each" in refused.value.remedy


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=lr,wide",),
        ("experiment=table2",),
        (
            "experiment=demo,staleness",
            "hydra/launcher=sparsepipe",
        ),
        ("experiment=table2,tabel3",),  # Hydra tells what there is
        ("experiment=table2,(",),
    ],
)
def test_others_are_left_to_hydra(words: tuple[str, ...], mine: str) -> None:
    refuse_several(words, config_loader(["--config-dir", mine]))


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=table2", "model.widht=0.5"],  # whose swept options choose other models
        ["model=sparse_vgg16_bn,dense_vgg16_bn", "seed=0,1", "model.widht=0.5,1"],
        ["model=sparse_vgg16_bn", "model.widht=interval(0.5,1)"],
    ],
)
def test_a_key_that_no_job_knows_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'model.widht' \(nearest: 'model.width'\)"):
        refuse_unknown_keys(admit(words), config_loader())


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=table2", "model.width=0.5"],
        ["model=sparse_vgg16_bn,fcn2d", "model.checkpointing=true"],  # which only one knows
        ["trainer.max_epochs=many,1"],  # wrong for one job
        ["seed=0,1", "data=shaeps"],  # which Hydra refuses
        ["seed=range(0,0)", "hydra.sweeper.params=null"],  # no job
    ],
)
def test_of_other_sweeps_jobs_are_refused_one_by_one(words: list[str]) -> None:
    refuse_unknown_keys(admit(words), config_loader())


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
    assert "run a separate command for each experiment" in ended.stderr
    assert not list(shell.cwd.iterdir())
