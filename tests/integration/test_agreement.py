"""What ranks must agree on before they train."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.errors import ConfigError
from tests.support.command_line import composed
from tests.support.processes import outcomes
from tests.support.resolved import resolved

DP = ("parallel=dp", "parallel.devices=2", "hardware.accelerator=cpu")


def train_in(rank: int, directories: list[Path]) -> None:
    from sparsepipe.runs.rundir import RunDir

    config = composed("experiment=tiny", "trainer.max_epochs=2", *DP)
    run = resolved(config, directory=RunDir(directories[rank]))
    with run.watch:
        run.task.run(run)


@pytest.mark.parametrize(
    "missing", ["last.ckpt", pytest.param("fitted.json", marks=pytest.mark.full)]
)
def test_ranks_that_see_different_files_are_refused(
    job: Callable[..., Path], tmp_path: Path, missing: str
) -> None:
    """As nodes do whose outputs are not on a shared directory."""
    shutil.copytree(job("trainer.max_epochs=1"), tmp_path / "other")
    run = next(Path("outputs/tiny").glob("[!.]*")).absolute()
    (tmp_path / "other" / "checkpoints" / missing).unlink()
    found = outcomes(train_in, 2, [run, tmp_path / "other"], limit_s=60)
    for outcome in found:
        assert isinstance(outcome.error, ConfigError), str(outcome)
        assert "find different checkpoints" in outcome.error.message
        assert "all nodes share" in outcome.error.remedy
