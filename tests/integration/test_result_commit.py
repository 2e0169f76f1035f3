"""Which commit a result names: the one that its run began with, whatever comes meanwhile."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import sparsepipe
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell

ROOT = Path(sparsepipe.__file__).parents[1]
COMMITS = "callbacks={commits: {_target_: tests.support.tinysweep.Commits, checkout: %s}}"


@dataclass(frozen=True)
class FromCheckout(Shell):
    """The command as a checkout has it."""

    checkout: Path = Path()

    @property
    def environment(self) -> dict[str, str]:
        there = super().environment
        return {**there, "PYTHONPATH": f"{self.checkout}:{there['PYTHONPATH']}"}


def git(checkout: Path, *arguments: str) -> str:
    names = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    done = subprocess.run(
        ["git", *names, "-C", str(checkout), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the package and its configuration."""
    made = tmp_path / "checkout"
    for name in ("sparsepipe", "conf", "hydra_plugins"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    git(made.parent, "init", "--quiet", str(made))
    git(made, "add", "--all")
    git(made, "commit", "--quiet", "-m", "first")
    return made


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_committed_while_a_run_goes_on_is_not_its_commit(
    checkout: Path, tmp_path: Path, ranks: int
) -> None:
    before = git(checkout, "rev-parse", "HEAD")
    work = tmp_path / "work"
    work.mkdir()
    several = ("parallel=dp", f"parallel.devices={ranks}", "hardware=cores") if ranks > 1 else ()
    there = FromCheckout(work, before=(), checkout=checkout)
    done = there("trainer.max_epochs=1", COMMITS % checkout, *several)
    assert git(checkout, "rev-parse", "HEAD") != before, "the test has committed"
    assert read_json(done.run / "result.json")["git_commit"] == before
