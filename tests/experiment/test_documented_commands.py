"""Commands of the README, of docs/ and of recorded experiments compose; guides: test_guides.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiment_harness import composed
from guide_cases import OTHERS, ROOT, Command, commands_in

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
    composed(*command.first_job)


@pytest.mark.parametrize("name", ["README.md", "docs/experiments.md", "experiments/fig9/README.md"])
def test_commands_are_found(name: str) -> None:
    assert name in {document for document, _ in COMMANDS.values()}
