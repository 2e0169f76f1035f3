"""Commands of documents compose, shells complete them, and the smallest scale is as told."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import composed
from tests.support.guide_cases import OTHERS, ROOT, Command, commands_in

COMMANDS = {
    command.words: (str(path.relative_to(ROOT)), command)
    for path in reversed(OTHERS)
    for command in commands_in(path)
}
"""Each with the first document that has it."""


@pytest.mark.parametrize(
    ("document", "command"),
    COMMANDS.values(),
    ids=lambda v: v if isinstance(v, str) else " ".join(v.words),
)
def test_it_composes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not command.own, f"{document} shows no files that it could need"
    for job in command.jobs:
        composed(*job)


def test_variables_may_stand_before_a_command_and_every_option_counts(tmp_path: Path) -> None:
    document = tmp_path / "shown.md"
    document.write_text(
        "Or `OMP_NUM_THREADS=1 sparsepipe scale=desk`.\n\n"
        "```\n"
        "A=1 B=$HERE sparsepipe -m paper/network=dense,sparse seed=1 task.x=1,2  # said\n"
        "my_sparsepipe paper/network=no\n"
        "```\n"
    )
    swept, alone = commands_in(document)
    assert alone.words == ("scale=desk",)
    assert list(swept.jobs) == [
        ["paper/network=dense", "seed=1", "task.x=1"],
        ["paper/network=sparse", "seed=1", "task.x=1"],
    ]


@pytest.mark.parametrize(
    "name", ["docs/first_experiment.md", "docs/experiments.md", "experiments/fig9/README.md"]
)
def test_commands_are_found(name: str) -> None:
    assert name in {document for document, _ in COMMANDS.values()}


def test_few_shapes_of_few_classes_are_tested_at_scale_smoke() -> None:
    text = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"^\| tested on \| ([^|]*) \|", text, re.MULTILINE)
    batches, shapes, of_all, classes = map(int, re.findall(r"\d+", told))
    config = composed("experiment=table2", "scale=smoke", "paper/trial=one_device")
    assert batches == config.trainer.limit_test_batches
    assert shapes == batches * config.data.get("batch_size")
    per_class = config.data.get("source")["test_per_class"]
    assert classes == shapes // per_class
    with (ROOT / "experiments/table2_smoke/ledger.csv").open(encoding="utf-8") as stream:
        trainings = [row for row in csv.DictReader(stream) if row["task_name"] == "train"]
    assert trainings
    for row in trainings:
        tested = [key for key, value in row.items() if key.startswith("test/accuracy/") and value]
        assert (len(tested), int(row["test_shapes"])) == (classes, of_all)


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
