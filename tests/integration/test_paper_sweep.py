"""One small sweep of the paper's Table II, from its command to its report and its gaps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.command_line import Shell
from tests.support.reported_cells import cells, there

FEW = ("scale=smoke", "data.source.train_per_class=1", "data.source.test_per_class=1")
NARROW = ("paper/trial=one_device", "paper/network=sparse_p025", "data.resolution=32")
HEADS = ("grid", "devices", "network", "p")
SPARSE, DENSE = ("32³", "1", "sparse", "0.25"), ("32³", "1", "dense", "1")
TRAINED = ("train_accuracy", "test_accuracy", "epoch_time")


def swept(shell: Shell) -> Path:
    """The CSV of the report in which a sweep ends."""
    done = shell.sweep("experiment=table2", "name=mine", *FEW, *NARROW)
    assert done.code == 0, done.err
    (file,) = shell.cwd.glob("outputs/mine/sweeps/*/report/table2.csv")
    return file


@pytest.mark.full
def test_a_sweep_ends_in_a_report(shell: Shell) -> None:
    file = swept(shell)
    assert there(file, *HEADS) == {(*SPARSE, name) for name in TRAINED}
    assert file.with_name("report.html").exists()


@pytest.mark.full
def test_the_command_of_the_report_fills_its_gap(shell: Shell) -> None:
    """What the speedup lacks is D-1, by a part of the sweep that says all that is unusual here."""
    (command,) = re.findall("sparsepipe -m .*", swept(shell).with_name("report.md").read_text())
    words = [word for word in shlex.split(command)[2:] if not word.startswith("paths.")]
    dense = ("paper/trial=one_device", "paper/network=dense", "data.resolution=32")
    filled = shell(*words, *dense)
    assert filled.run.parent == shell.cwd / "outputs" / "mine"
    done = shell("task=report", "name=mine", "task.exhibits=[table2]")
    found = cells(done.run / "table2.csv", *HEADS)
    assert there(done.run / "table2.csv", *HEADS) == {
        (*row, name) for row in (SPARSE, DENSE) for name in (*TRAINED, "speedup")
    }
    assert float(found[*SPARSE, "speedup"]["ours"]) > 0
    assert "scale smoke; generated shapes" in found[*SPARSE, "speedup"]["setting"]
