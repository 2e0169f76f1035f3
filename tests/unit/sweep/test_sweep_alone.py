"""A sweep's directory: one at a time has it, and an earlier one's jobs are none of its own."""

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
from sparsepipe.sweep import alone, ending
from sparsepipe.sweep.ending import SweepEnd
from sparsepipe.sweep.record import records_of
from tests.support.command_line import Shell
from tests.support.sweep_cases import leave_record

PLANS = ("task=partition", "model=sparse_vgg16_bn", "hardware=paper_5gpu")
TAKES = """
import pathlib, sys, time
from sparsepipe.sweep.alone import take
take(pathlib.Path(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    yield
    alone.give_back()


def test_what_an_earlier_sweep_has_left_is_put_aside(tmp_path: Path) -> None:
    """All but what is overwritten, or is none of a sweep's."""
    for number in (1, 2):
        leave_record(tmp_path, 0, f"seed={number}", run=None)
        (tmp_path / "report").mkdir()
        page = ("table2.csv", "report.html")[number - 1]  # one that was not made to its end
        names = ("table.md", "optimization_results.yaml", f"report/{page}", "mine.txt")
        for name in names:
            (tmp_path / name).write_text(str(number))
        alone.take(tmp_path)
        assert records_of(tmp_path) == []
        aside = tmp_path / "earlier" / str(number)
        assert [one.text for one in records_of(aside)] == [f"seed={number}"]
        assert (aside / "report" / page).read_text() == str(number)
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "earlier", "mine.txt"}


@pytest.mark.parametrize(
    "name",
    [
        "jobs", "jobs/submit.sh", "jobs/train/job.yaml", "jobs/0/train.sh",
        "report/paper.tex", "report/report.html", "table.csv", "table.md",
    ],
)  # fmt: skip
def test_what_no_sweep_has_left_is_not_touched(tmp_path: Path, name: str) -> None:
    """Jobs and reports are somebody's own in many a project, in whose directory no sweep may be."""
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="is in the way") as refused:
        alone.take(tmp_path, reports=True)
    assert f"{tmp_path / name.partition('/')[0]} is in the way" in str(refused.value)
    assert f"hydra.sweep.dir={tmp_path / 'sweep'}" in str(refused.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"
    alone.take(tmp_path / "sweep", reports=True)


def test_somebodys_report_beside_a_sweep_that_makes_none(tmp_path: Path) -> None:
    """It is in nobody's way, and stays, until a sweep would write its own there."""
    mine = tmp_path / "report" / "paper.tex"
    mine.parent.mkdir()
    mine.write_text("mine")
    alone.take(tmp_path)
    leave_record(tmp_path, 0, "seed=0", run=None)
    alone.take(tmp_path)
    assert len(records_of(tmp_path / "earlier" / "1")) == 1
    leave_record(tmp_path, 0, "seed=0", run=None)
    with pytest.raises(ConfigError, match="report is in the way"):
        alone.take(tmp_path, reports=True)
    assert len(records_of(tmp_path)) == 1, "nothing is moved by a sweep that is refused"
    assert mine.read_text() == "mine"


def test_what_a_killed_sweep_has_left(tmp_path: Path) -> None:
    """Before it had written anything, or when its first job had been given its own."""
    (tmp_path / "jobs" / "0").mkdir(parents=True)
    (tmp_path / "jobs" / "0" / ".job.yaml.7.tmp").touch()
    (tmp_path / "report").mkdir()
    alone.take(tmp_path, reports=True)
    assert not (tmp_path / "earlier").exists()
    (tmp_path / "jobs" / "0" / "job.yaml").touch()
    alone.take(tmp_path, reports=True)
    assert (tmp_path / "earlier" / "1" / "jobs" / "0" / "job.yaml").exists()


@pytest.mark.parametrize(("experiment", "refused"), [("table2", True), ("demo", False)])
def test_sweeps_of_the_papers_experiments_make_a_report(
    tmp_path: Path, experiment: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    monkeypatch.setattr(ending, "_begun", begun)
    monkeypatch.setattr(ending, "announce", lambda config: None)  # which sets the environment
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "paper.tex").touch()
    runtime = {"choices": {"experiment": experiment}}
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}, "runtime": runtime}})
    if refused:
        with pytest.raises(SystemExit):
            SweepEnd().on_multirun_start(config)
    else:
        SweepEnd().on_multirun_start(config)
    assert bool(begun) != refused


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        alone.take(tmp_path / "file")


def test_two_sweeps_in_one_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second one is refused, before it has touched anything, for as long as the first runs."""
    first = subprocess.Popen(
        [sys.executable, "-c", TAKES, str(tmp_path)], stdout=subprocess.PIPE, text=True
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
    alone.take(tmp_path)


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
    assert len(records_of(place / "earlier" / "1")) == 2
