"""A sweep's directory: one sweep at a time has it, and an earlier one's jobs do not count."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sparsepipe.errors import ConfigError, OutputError
from sparsepipe.sweep import callbacks
from sparsepipe.sweep.callbacks import SweepEnd, claim
from sparsepipe.sweep.record import records_of
from tests.support.command_line import Shell
from tests.support.sweep_cases import leave_record

PLANS = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")
CLAIMS = """
import pathlib, sys, time
from sparsepipe.sweep.callbacks import claim
claim(pathlib.Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    callbacks._lock.close()


def test_the_records_of_an_earlier_sweep_do_not_count(tmp_path: Path) -> None:
    claim(tmp_path)
    leave_record(tmp_path, 0, "seed=1", run=None)
    for name in ("table.md", "optimization_results.yaml", "jobs/mine.sh", "mine.txt"):
        (tmp_path / name).touch()
    claim(tmp_path)
    assert records_of(tmp_path) == []
    found = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {callbacks._LOCK, "mine.sh", "mine.txt"}, "files of others stay"


@pytest.mark.parametrize("name", ["jobs/submit.sh", "report/paper.tex", "table.csv", "table.md"])
def test_files_that_no_sweep_has_written_are_not_touched(tmp_path: Path, name: str) -> None:
    """Many a project has jobs and reports of its own, in whose directory no sweep may be."""
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="is in the way") as refused:
        claim(tmp_path)
    assert f"{tmp_path / name.partition('/')[0]} is in the way" in str(refused.value)
    assert f"hydra.sweep.dir={tmp_path / 'sweep'}" in str(refused.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    claim(tmp_path / "sweep")


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        claim(tmp_path / "file")


def test_two_sweeps_in_one_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second one is refused, before it has touched anything, for as long as the first runs."""
    first = subprocess.Popen(
        [sys.executable, "-c", CLAIMS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    with first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "\n"
            kept = leave_record(tmp_path, 0, "seed=0", run=None)
            with caplog.at_level(logging.ERROR), pytest.MonkeyPatch.context() as patch:
                patch.setattr(logging.getLogger("sparsepipe"), "propagate", True)
                with pytest.raises(SystemExit) as refused:
                    SweepEnd().on_multirun_start(config)
        finally:
            first.send_signal(signal.SIGKILL)
    assert refused.value.code == 2
    assert f"another sweep runs in {tmp_path}" in caplog.text
    assert "remedy: wait for it or end it" in caplog.text
    assert records_of(tmp_path) == [kept]
    claim(tmp_path)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_sweep_in_the_directory_of_an_earlier_one(shell: Shell) -> None:
    place = shell.cwd / "place"
    where = ("hydra/launcher=sparsepipe", f"hydra.sweep.dir={place}")
    assert shell.sweep(*PLANS, *where, "seed=0,-1").code == 2
    again = shell.sweep(*PLANS, *where, "seed=0")
    assert again.code == 0, again.err
    assert "failed" not in again.err
    (record,) = records_of(place)
    assert record.before
    assert len((place / "table.csv").read_text().splitlines()) == 2
