"""What trainings do with the runs that measure for them: wait, measure anew, end, tell why."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsepipe.config.build import build_inventory
from sparsepipe.config.schema import Measuring
from sparsepipe.errors import ConfigError, ProfileError, SparsePipeError
from sparsepipe.launch.job import run_job
from sparsepipe.planning.measuring import measure_devices, profile_spec
from sparsepipe.profiling import Profile
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed, wait_for
from tests.support.paths import ROOT, python_path
from tests.support.planned_cases import MODEL, SLOW, TWO, profile
from tests.support.resolved import run_directory

Job = Callable[..., Path]
HOW = Measuring(num_warmup=1, num_measured=2)
TRAINING = (
    *MODEL, *TWO, SLOW, "parallel=hete_mp",
    "parallel.search.measure.num_warmup=1", "parallel.search.measure.num_measured=2",
)  # fmt: skip
WAITING = """
import sys
from pathlib import Path
from tests.support.command_line import composed
from sparsepipe.runs.logs import configure
from sparsepipe.runs.rundir import RunDir
from sparsepipe.launch.job import run_job
from tests.support.resolved import plan_run
configure()
config = composed(*sys.argv[1:])
plan_run(config, RunDir(Path("waiting")), run_job=run_job)
"""


@pytest.fixture(autouse=True)
def _for_ranks(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def device() -> str:
    return build_inventory(composed(*TRAINING)).hosts[0].devices[0].name


def profile_run() -> RunDir:
    """The run that measures for the training, before anybody has begun it."""
    wanted = profile_spec(composed(*TRAINING), device(), HOW)
    return run_directory(wanted)


def finish(directory: RunDir) -> Path:
    """Does what a run that measures does."""
    directory.path.mkdir(parents=True)
    profile([1, 1, 1, 1]).save(directory.path / "profile.json")
    directory.finish({"kind": "measured"})
    return directory.path / "profile.json"


@pytest.mark.full
def test_a_training_waits_for_another_that_measures_the_same() -> None:
    directory = profile_run()
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, *TRAINING], stderr=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stderr is not None
            with locked(directory):
                said = f"another process is working on {directory.path}: waiting for it"
                assert any(said in line for line in other.stderr)
                measured = finish(directory)
            rest = other.stderr.read()
            assert other.wait() == 0, rest
        finally:
            other.kill()  # where it still runs
    assert read_json("waiting/plan.json")["measured"] == {device(): str(measured)}
    assert Profile.load(measured) == profile([1, 1, 1, 1])


def test_waiting_has_an_end(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "run")
    with (
        locked(directory),
        pytest.raises(ConfigError, match=r"working on .*run, for longer than 0\.3 s"),
        locked(directory, wait_s=0.3),
    ):
        pass
    with locked(directory):
        pass


@pytest.mark.full
def test_force_measures_anew(capfd: pytest.CaptureFixture[str]) -> None:
    before = finish(profile_run())
    config = composed(*TRAINING)
    assert measure_devices([device()], config, HOW, run_job=run_job)[device()] == (
        Profile.load(before),
        before,
    )
    ((found, path),) = measure_devices(
        [device()], config.replace(force=True), HOW, run_job=run_job
    ).values()
    assert path == before
    assert found.meta["source"] == "task=profile"
    assert RunDir(path.parent).attempt == 1
    told = capfd.readouterr().err
    assert "s of measuring" in told
    # Amid a training's log there is no table, and the training tells of its share itself.
    assert "| layer" not in told
    assert "of the training" not in told
    assert (path.parent / "profile.txt").read_text().startswith("| layer")
    assert "profile_share_of_training" not in read_json(path.parent / "result.json")
    ((again, _),) = measure_devices([device()], config, HOW, run_job=run_job).values()
    assert again == found


def test_a_failed_measurement_is_reported_as_an_error_of_the_training() -> None:
    config = composed(*TRAINING)
    with pytest.raises(ConfigError, match=r"^while measuring nobody: the inventory has no device"):
        measure_devices(["nobody"], config, HOW, run_job=run_job)
    with pytest.raises(ProfileError) as refused:
        measure_devices([device()], config, Measuring(num_batches=0), run_job=run_job)
    said = f"while measuring {device()}: 0 batches"
    assert refused.value.message.startswith(said)


@pytest.mark.full
def test_a_model_that_cannot_be_measured(job: Job) -> None:
    with pytest.raises(SparsePipeError, match="somebody's own mistake") as failed:
        job(*TRAINING, "model._target_=tests.support.tinyfaults.mistaken")
    last = failed.value.message.splitlines()[-1]
    assert last.startswith(f"while measuring {device()}: rank 0 raised ValueError: somebody's")
    assert not list(Path("outputs").glob("*/*/")), "half a run was left behind"


@pytest.mark.full
def test_ctrl_c_while_measuring(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # else this process counts as one that was left behind
    started = shell.start(*TRAINING[1:], "model._target_=tests.support.tinyfaults.patient")
    wait_for((shell.cwd / "in-layer").exists)
    started.send_signal(signal.SIGINT)
    done = shell.wait(started)
    assert done.code == 130, done.err
    assert "stopped by SIGINT; run the same command again to go on" in done.err
    assert not list((shell.cwd / "outputs").glob("*/*/"))
