"""One small sweep of the paper's Table II, from its command to its report and its gaps."""

from __future__ import annotations

import shlex

from experiment_harness import Shell
from reported_cells import cells, there

FEW = ("scale=smoke", "data.source.train_per_class=1", "data.source.test_per_class=1")
NARROW = ("trial=one_device", "network=sparse_p025", "data.resolution=32")
HEADS = ("grid", "devices", "network", "p")
SPARSE, DENSE = ("32³", "1", "sparse", "0.25"), ("32³", "1", "dense", "1")
TRAINED = ("train_accuracy", "test_accuracy", "epoch_time")


def test_a_sweep_ends_in_a_report_whose_commands_fill_its_gaps(shell: Shell) -> None:
    swept = shell.sweep("experiment=table2", "name=mine", *FEW, *NARROW)
    assert swept.code == 0, swept.err
    (file,) = shell.cwd.glob("outputs/mine/sweeps/*/report/table2.csv")
    assert there(file, *HEADS) == {(*SPARSE, name) for name in TRAINED}
    # What the speedup lacks is D-1, by a command that says all that is unusual here.
    words = shlex.split(cells(file, *HEADS)[*SPARSE, "speedup"]["command"])
    filled = shell(*words[words.index("sparsepipe") + 1 :])
    assert filled.run.parent == shell.cwd / "outputs" / "mine"
    done = shell("task=report", "experiment=table2", "name=mine")
    found = cells(done.run / "table2.csv", *HEADS)
    assert there(done.run / "table2.csv", *HEADS) == {
        (*row, name) for row in (SPARSE, DENSE) for name in (*TRAINED, "speedup")
    }
    assert float(found[*SPARSE, "speedup"]["ours"]) > 0
    assert "scale smoke; generated shapes" in found[*SPARSE, "speedup"]["setting"]
