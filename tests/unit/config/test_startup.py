"""What starts the command imports no library that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_HEAVY = ("torch", "pytorch_lightning", "numpy", "matplotlib", "pandas")
_COMMAND = """
import sys
from sparsepipe.cli import main
sys.argv[1:] = {arguments}
try:
    main()
except SystemExit as end:
    assert end.code == {code}, end.code
"""


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sparsepipe", ""),
        (_COMMAND.format(arguments=["--help"], code=0), ""),
        (_COMMAND.format(arguments=["--cfg", "job"], code=0), ""),
        (_COMMAND.format(arguments=["trainer.max_epoch=3"], code=2), "trainer.max_epochs"),
        (_COMMAND.format(arguments=["data.resolutoin=16"], code=2), "data.resolution"),
        (
            _COMMAND.format(arguments=["-m", "experiment=table2", "model.widht=1"], code=2),
            "model.width",
        ),
        (_COMMAND.format(arguments=["--version"], code=0), ""),
        (_COMMAND.format(arguments=["model=sparse_vg"], code=2), "sparse_vgg19_bn"),
    ],
    ids=["import", "help", "cfg", "key", "key of a target", "sweep", "version", "option"],
)
def test_nothing_large_is_imported(code: str, error: str, tmp_path: Path) -> None:
    printed, imported = _run(code, tmp_path)
    assert error in printed
    assert not imported


def test_lists_and_comparisons_of_runs_do_not_wait_for_torch(tmp_path: Path) -> None:
    _, imported = _run("import sparsepipe.runs.disk, sparsepipe.tasks.compare", tmp_path)
    assert imported <= {"numpy"}


def _run(code: str, directory: Path) -> tuple[str, set[str]]:
    """What code prints on standard error, and which large libraries it imports."""
    code += f"\nimport sys\nprint(*({{*{_HEAVY}}} & {{*sys.modules}}), file=sys.stderr)\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=directory,
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stderr, {*done.stderr.splitlines()[-1].split()}
