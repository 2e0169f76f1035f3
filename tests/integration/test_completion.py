"""Completion in a real bash, as users install it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# The command under its own name, from wherever the tests run.
_COMMAND = """#!{python}
import sys
from sparsepipe.cli import main
sys.argv[0] = "sparsepipe"
main()
"""
# What bash does when Tab is pressed: it sets these and calls the function that is installed.
_TAB = """
eval "$(sparsepipe -sc install=bash)"
complete -p sparsepipe >&2
{tabs}
"""
_PRESS = """
COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}; words=($COMP_LINE)
[[ $COMP_LINE == *" " ]] && COMP_CWORD=${{#words[@]}} || COMP_CWORD=$(( ${{#words[@]}} - 1 ))
COMPREPLY=(); hydra_bash_completion; echo "${{COMPREPLY[@]}}"
"""


class Bash:
    """A shell in which the command is installed."""

    def __init__(self, cwd: Path) -> None:
        command = cwd / "bin" / "sparsepipe"
        command.parent.mkdir()
        command.write_text(_COMMAND.format(python=sys.executable))
        command.chmod(0o755)
        self.cwd = cwd / "here"
        self.cwd.mkdir()
        self._path = f"{command.parent}:{os.environ['PATH']}"

    def tab(self, *lines: str) -> list[set[str]]:
        """What Tab offers at the end of each line."""
        tabs = "".join(_PRESS.format(line=shlex.quote(line)) for line in lines)
        done = subprocess.run(
            ["bash", "--norc", "-c", _TAB.format(tabs=tabs)],
            cwd=self.cwd,
            env={**os.environ, "PATH": self._path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        assert "-F hydra_bash_completion sparsepipe" in done.stderr
        return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_tab_in_bash(tmp_path: Path) -> None:
    bash = Bash(tmp_path)
    offered = bash.tab(
        "sparsepipe mod",
        "sparsepipe model=sparse_resnet",
        "sparsepipe experiment=demo model.w",
        "sparsepipe data.re",
    )
    assert offered == [
        {"model=", "model."},
        {"model=sparse_resnet18", "model=sparse_resnet34", "model=sparse_resnet50"},
        {"model.width="},
        {"data.representation=", "data.resolution="},
    ]
    assert not list(bash.cwd.iterdir())


def test_the_completion_script_of_fish(tmp_path: Path) -> None:
    """It is seldom there to press Tab in."""

    def said(action: str, **environment: str) -> str:
        return subprocess.run(
            [tmp_path / "bin" / "sparsepipe", "-sc", f"{action}=fish"],
            cwd=bash.cwd,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    bash = Bash(tmp_path)
    installed = said("install")
    assert "complete -c sparsepipe" in installed
    assert "-sc query=fish" in installed
    assert said("query", COMP_LINE="sparsepipe model=sparse_vgg11").split() == [
        "model=sparse_vgg11_bn"
    ]
