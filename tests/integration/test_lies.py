"""Some hundred malformed files: each is refused by name, soon and with a remedy."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import lies
from tests.support.paths import python_path

_COMMANDS = Path(lies.__file__).parent / "programs" / "forked_commands.py"
_MOST_S = 20.0
_MOST_BYTES = 1.5 * 2**30
_QUICK = 50
"""Cases of the quick suite, drawn anew by no run: a failure can be repeated."""


class Commands:
    """Runs commands one after the other, each in a fork of one process."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder
        self.valid = folder / "valid"
        self._count = 0

    def new_folder(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)

    def __call__(self, cwd: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"cwd": str(cwd), "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("lies")
    lies.valid_files(folder / "valid")
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(_COMMANDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    ) as process:
        yield Commands(process, folder)
        assert process.stdin is not None
        process.stdin.close()


def _faults(case: lies.Case, ended: dict[str, Any]) -> list[str]:
    """What is wrong with how a command ended that had to refuse a file."""
    output = ended["output"]
    wrong = {
        f"it took {ended['seconds']:.0f} s": ended["seconds"] > _MOST_S,
        f"it took {ended['peak_bytes'] / 2**20:.0f} MiB": ended["peak_bytes"] > _MOST_BYTES,
        f"its exit code was {ended['code']}": ended["code"] <= 0,
        "it ended in a traceback": "Traceback" in output,
        "it does not name the file": Path(case.file).stem not in output,
        "it names no remedy": "remedy:" not in output,
    }
    return [text for text, is_so in wrong.items() if is_so]


def _check(commands: Commands, cases: list[lies.Case]) -> None:
    failed = []
    for case in cases:
        folder = commands.new_folder()
        case.write(folder, commands.valid)
        ended = commands(folder, case.arguments)
        if found := _faults(case, ended):
            failed.append(f"{case}: {'; '.join(found)}: {ended['output'][-300:]}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("subject", lies.SUBJECTS.values(), ids=lies.SUBJECTS)
def test_a_valid_file_is_taken(commands: Commands, subject: lies.Subject) -> None:
    folder = commands.new_folder()
    lies.valid_files(folder)
    ended = commands(folder, subject.arguments)
    assert ended["code"] == 0, ended["output"]


def test_some_malformed_files_are_refused(commands: Commands) -> None:
    _check(commands, random.Random(0).sample(lies.cases(), _QUICK))


@pytest.mark.full
@pytest.mark.parametrize("subject", lies.SUBJECTS)
def test_all_malformed_files_are_refused(commands: Commands, subject: str) -> None:
    _check(commands, [case for case in lies.cases() if case.subject == subject])
