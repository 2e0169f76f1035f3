"""Commands of the README, of docs/ and of recorded experiments compose; guides: test_guides.py."""

from __future__ import annotations

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


def test_the_serial_run_of_the_study_of_depth_is_one_of_them() -> None:
    row = ("paper/schedule=serial", "paper/depth=measured_2")
    assert ("experiment=pipeline_depth", *row) in COMMANDS


@pytest.mark.parametrize(
    "name", ["docs/first_experiment.md", "docs/experiments.md", "experiments/fig9/README.md"]
)
def test_commands_are_found(name: str) -> None:
    assert name in {document for document, _ in COMMANDS.values()}
