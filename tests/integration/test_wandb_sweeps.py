"""Weights & Biases without network, of a sweep that is killed and started again."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from sparsepipe.tracking.history import STEP
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, orphans, rows, wait_for
from tests.support.wandb_records import recorded

EPOCHS, STEPS = 3, {"single": 8, "dp": 4}  # of an epoch: 32 shapes, 4 for each device
SWEEP = (
    "hydra/launcher=sparsepipe",
    "hydra.launcher.cores_per_rank=1",
    "hardware.accelerator=cpu",
    "paper/trial=one_device,two_ranks,batch_search",
    f"trainer.max_epochs={EPOCHS}",
    "trainer.log_every_n_steps=1",
    "data.delay_s=0.1",
    "logger=wandb",
    "tags=[swept]",
)
KILL_AFTER = (2, 5)  # epochs of all trainings
LIMIT_S = 400.0


def epochs(shell: Shell) -> int:
    tables = shell.cwd.glob("outputs/tiny/*/metrics.csv")
    return sum(max(0, len(table.read_text().splitlines()) - 1) for table in tables)


def assert_told_once(run: Path) -> None:
    """One run with its settings, whose history goes on from row to row as if it had no pauses."""
    found = recorded(run)
    result = read_json(run / "result.json")
    assert found.run["run_id"] == f"tiny-{run.name}"
    assert (found.run["job_type"], found.run["tags"]) == (result["task_name"], ["swept"])
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for group in ("data", "model", "optim", "task", "trainer"):
        assert found.config[group] == settings[group]
    assert [row["_step"] for row in found.history] == list(range(len(found.history)))
    assert found.summary["kind"] == "measured"
    assert found.of("exit")[0].get("exit_code", 0) == 0
    if result["task_name"] == "fit_batch":
        assert found.summary["largest_batch"] == 8
        return
    steps = [row[STEP] for row in found.metrics if "train/loss_step" in row]
    assert steps == list(range(EPOCHS * STEPS[result["strategy"]])), "each step once"
    for name in ("val/loss", "val/accuracy", "train/loss"):
        told = [(row["epoch"], row[name]) for row in found.metrics if name in row]
        kept = [(int(row["epoch"]), pytest.approx(float(row[name]))) for row in rows(run)]
        assert told == kept, name
    assert found.summary["test/accuracy"] == pytest.approx(result["test/accuracy"])
    assert "confusion_matrix_table" in found.media


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_sweep_that_is_killed_leaves_one_run_for_each_job(shell: Shell) -> None:
    for count in KILL_AFTER:
        sweep = shell.start(*SWEEP, "hydra.mode=MULTIRUN")
        wait_for(lambda count=count: epochs(shell) >= count, timeout_s=LIMIT_S)
        assert sweep.poll() is None, "it was too fast to be killed"
        sweep.kill()
        shell.wait(sweep)
        assert not orphans(shell.cwd)
    done = shell.sweep(*SWEEP, timeout_s=LIMIT_S)
    assert done.code == 0, done.err
    runs = shell.runs()
    assert Counter(read_json(run / "result.json")["strategy"] for run in runs) == {
        "single": 2, "dp": 1,
    }  # fmt: skip
    begun = [read_json(run / "result.json")["starts"] for run in runs]
    assert max(begun) > 1, "at least one was killed in the middle"
    for run in runs:
        assert_told_once(run)
    (group,) = {recorded(run).run["run_group"] for run in runs}
    assert re.fullmatch(r"tiny [0-9a-f]{8}", group), "of the sweep, however often it was started"
