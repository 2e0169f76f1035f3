"""Some hundred malformed files: each is refused by name, soon and with a remedy."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsepipe.sweep.record import records_of
from tests.support import lies, lies_of_runs
from tests.support.paths import python_path
from tests.support.sweep_cases import leave_record

_COMMANDS = Path(lies.__file__).parent / "programs" / "forked_commands.py"
_MOST_S = 20.0
_MOST_BYTES = 1.5 * 2**30
_QUICK = 20
"""Cases of each half in the quick suite, drawn anew by no run: a failure can be repeated."""
_STARTED = 10
"""Cases that go through a command of their own, which takes seconds to start."""
SUBJECTS = {**lies.SUBJECTS, **lies_of_runs.SUBJECTS}


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


def _ended_well(ended: dict[str, Any]) -> bool:
    return ended["code"] == 0 and "Traceback" not in ended["output"]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("lies")
    lies.valid_files(folder / "valid")
    lies_of_runs.training_files(folder / "valid")
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(_COMMANDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    ) as process:
        found = Commands(process, folder)
        trained = found(found.valid, lies_of_runs.TRAIN)
        assert _ended_well(trained), trained["output"]
        lies_of_runs.derived_files(found.valid)
        yield found
        assert process.stdin is not None
        process.stdin.close()


def _faults(case: lies.Case, ended: dict[str, Any]) -> list[str]:
    """What is wrong with how a command ended."""
    output = ended["output"]
    refused = ended["code"] > 0
    wrong = {
        f"it took {ended['seconds']:.0f} s": ended["seconds"] > _MOST_S,
        f"it took {ended['peak_bytes'] / 2**20:.0f} MiB": ended["peak_bytes"] > _MOST_BYTES,
        f"its exit code was {ended['code']}": ended["code"] < int(case.is_refused),
        "it ended in a traceback": "Traceback" in output,
        f"it does not name {case.named}": refused and case.named not in output,
        "it names no remedy": refused and "remedy:" not in output,
    }
    return [text for text, is_so in wrong.items() if is_so]


def _failure(case: lies.Case, ended: dict[str, Any]) -> list[str]:
    """What is wrong in one text; none where nothing is."""
    found = _faults(case, ended)
    return [f"{case}: {'; '.join(found)}: {ended['output'][-300:]}"] if found else []


def _check(commands: Commands, cases: list[lies.Case]) -> None:
    failed = []
    for case in cases:
        folder = commands.new_folder()
        case.write(folder, commands.valid)
        failed += _failure(case, commands(folder, case.arguments))
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(
    "name",
    [*lies.SUBJECTS, *(pytest.param(n, marks=pytest.mark.full) for n in lies_of_runs.SUBJECTS)],
)
def test_a_valid_file_is_taken(commands: Commands, name: str) -> None:
    subject = SUBJECTS[name]
    folder = commands.new_folder()
    subject.case("", "", (commands.valid / subject.file).read_bytes()).write(folder, commands.valid)
    ended = commands(folder, subject.arguments)
    assert _ended_well(ended), ended["output"]


def test_some_malformed_files_are_refused(commands: Commands) -> None:
    drawn = random.Random(0)
    _check(commands, drawn.sample(lies.cases(), _QUICK))
    _check(commands, drawn.sample(lies_of_runs.cases(commands.valid), _QUICK))


@pytest.mark.full
@pytest.mark.parametrize("subject", [*SUBJECTS, "command line"])
def test_all_malformed_files_are_refused(commands: Commands, subject: str) -> None:
    found = [*lies.cases(), *lies_of_runs.cases(commands.valid)]
    _check(commands, [case for case in found if case.subject == subject])


@pytest.mark.full
def test_some_are_refused_by_the_command_as_users_start_it(commands: Commands) -> None:
    found = [*lies.cases(), *lies_of_runs.cases(commands.valid)]
    failed = []
    for case in random.Random(1).sample([each for each in found if each.is_refused], _STARTED):
        folder = commands.new_folder()
        case.write(folder, commands.valid)
        began_s = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "sparsepipe", *case.arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        values = {"code": ended.returncode, "output": ended.stdout + ended.stderr}
        failed += _failure(case, {**values, "seconds": time.monotonic() - began_s, "peak_bytes": 0})
    assert not failed, "\n".join(failed)


def test_malformed_records_of_sweeps_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read as long as a sweep runs, and by what Hydra calls at its end."""
    monkeypatch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
    leave_record(tmp_path / "valid", 0, "seed=0", run=None)
    (valid,) = records_of(tmp_path / "valid")
    for number, case in enumerate(lies_of_runs.records(dataclasses.asdict(valid))):
        caplog.clear()
        sweep = tmp_path / str(number)
        case.write(sweep, tmp_path / "valid")
        assert records_of(sweep) == [], case
        is_there = (sweep / "jobs/0/record.json").exists()
        assert not is_there or str(sweep / "jobs/0/record.json") in caplog.text, case
