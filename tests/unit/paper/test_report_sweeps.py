"""The report at the end of a sweep."""

from __future__ import annotations

import logging
import os
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from sparsepipe.config import compose
from sparsepipe.utils.files import read_json
from tests.support.command_line import composed
from tests.support.reported_runs import leave
from tests.support.sweep_cases import leave_record
from tests.support.wandb_records import recorded


def at_the_end_of_a_sweep(
    tmp_path: Path, experiment: str, *overrides: str, swept: tuple[str, ...] = ()
) -> Path:
    """Where its report is, if there is any."""
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        config = hydra_compose(
            "config",
            [f"experiment={experiment}", f"paths.outputs={tmp_path / 'outputs'}", *overrides],
            return_hydra_config=True,
        )
    config.hydra.overrides.task += swept  # which no single run takes
    OmegaConf.update(config, "hydra.sweep.dir", str(tmp_path / "sweep"), force_add=True)
    callback = instantiate(config.hydra.callbacks.sweep_report)
    callback.on_multirun_end(config)
    return tmp_path / "sweep/report"


def test_a_sweep_ends_in_a_report(tmp_path: Path) -> None:
    told = {
        "task_name": "table3",
        "study.exhibit": "table3",
        "8gpu/HETE-MP/config": "7-1",
        "task.bandwidth_bytes_per_s": 60e6,
        "task.mp_cost_model": "sparsepipe_mp",
        "task.hete_cost_model": "sparsepipe_hete",
        "task.order": "by_count",
    }
    leave(tmp_path / "outputs", "a", name="mine", **told)
    made = at_the_end_of_a_sweep(tmp_path, "table3", "name=mine")
    assert "60 MB/s between all GPUs" in (made / "report.md").read_text()


def test_commands_write_where_the_sweep_does(tmp_path: Path) -> None:
    made = at_the_end_of_a_sweep(tmp_path, "table2")
    (command,) = re.findall("sparsepipe -m .*", (made / "report.md").read_text())
    places = shlex.split(command)[-1]
    assert composed(places).to_dict()["paths"]["outputs"] == str(tmp_path / "outputs")


def test_jobs_that_did_not_finish_are_named(tmp_path: Path) -> None:
    leave_record(tmp_path / "sweep", 0, "paper/network=sparse", run=tmp_path)
    leave_record(tmp_path / "sweep", 2, "++data.resolution=50", "paper/network=dense", run=None)
    made = at_the_end_of_a_sweep(tmp_path, "table2")
    for name in ("report.md", "report.html"):
        text = (made / name).read_text()
        assert "job 3 (data.resolution=50 paper/network=dense)" in text
        assert "it broke" in text
        assert "remedy: mend it" in text
        assert "paper/network=sparse)" not in text


@pytest.mark.full
def test_a_tracker_has_the_report_of_a_sweep(tmp_path: Path) -> None:
    made = at_the_end_of_a_sweep(tmp_path, "table3", "name=mine", "logger=wandb", "tags=[swept]")
    found = recorded(made)
    assert (found.run["run_id"], found.run["job_type"]) == ("mine-report-sweep", "report")
    assert found.run["tags"] == ["swept"]
    assert "experiment=table3" in found.config["sweep"]
    table = read_json(found.media["tables/table3"])
    assert {"exhibit", "paper", "ours", "runs"} <= set(table["columns"])
    assert len(table["data"]) == 8 * 3


def test_a_tracker_that_does_not_begin_leaves_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "0")  # its process has no time to start
    with caplog.at_level(logging.WARNING):
        made = at_the_end_of_a_sweep(tmp_path, "table3", "name=mine", "logger=wandb")
    assert (made / "report.html").exists()
    told = [message for message in caplog.messages if "Weights & Biases cannot begin" in message]
    assert len(told) == 1
    assert "leave out logger=wandb" in told[0]
    assert "WANDB_DATA_DIR" not in os.environ  # the next job's tables would wait in this one's


def test_other_sweeps_have_no_report(tmp_path: Path) -> None:
    assert not at_the_end_of_a_sweep(tmp_path, "demo").exists()
