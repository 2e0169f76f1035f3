"""Trainings whose plan is searched for: devices measured first, or by profiles that are given."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsepipe.cluster import Inventory
from sparsepipe.config.build import build_inventory
from sparsepipe.config.run_spec import RunSpec
from sparsepipe.config.schema import Measuring
from sparsepipe.errors import ConfigError, HardwareError, PlanError, ProfileError, SparsePipeError
from sparsepipe.launch.job import run_job
from sparsepipe.planning.measuring import measure_devices, profile_spec
from sparsepipe.profiling import Profile
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.utils.files import read_json
from tests.support.command_line import Shell, composed, fault, wait_for
from tests.support.paths import ROOT, python_path
from tests.support.planned_cases import MODEL, SLOW, TWO, given, profile
from tests.support.resolved import plan_run, resolved, run_directory

pytestmark = pytest.mark.usefixtures("workplace", "networks_for_ranks")
Job = Callable[..., Path]
LOGGER = ("logger.own._target_=pytorch_lightning.loggers.CSVLogger", "logger.own.save_dir=logged")
QUICKLY = ("parallel.search.measure.num_warmup=1", "parallel.search.measure.num_measured=2")


def profiles() -> list[Path]:
    return sorted(Path("outputs/profiles").glob("*/profile.json"))


@pytest.mark.full
def test_it_is_all_it_takes(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    settings = (*MODEL, *TWO, *QUICKLY, SLOW, "trainer.max_epochs=1", "task.test=false")
    with caplog.at_level("INFO", logger="sparsepipe"):
        run = job(*settings, "parallel=hete_mp", *LOGGER)
    (measured,) = profiles()
    plan = Plan.from_json((run / "plan.json").read_text())
    result = read_json(run / "result.json")
    assert result["profiling_s"] == read_json(measured)["meta"]["cost_s"]
    assert plan.config == result["plan_config"] == "1-1"
    assert result["plan_strategy"] == "hete_mp"
    assert result["plan_bottleneck_s"] == plan.details["bottleneck_s"]
    assert result["plan_shapes_per_s"] == pytest.approx(2 / plan.details["bottleneck_s"])
    assert result["train_shapes_per_s"] > 0
    assert plan.details["measured"] == {measured_device(measured): str(measured.absolute())}
    assert [name.rsplit("/", 1)[1] for stage in plan.stages for name in stage.devices] == ["0", "1"]
    assert f"plan by hete_mp (sparsepipe_hete) from profiles ({measured_device(measured)}" in (
        caplog.text
    )
    assert (run / "plan.txt").read_text().strip() in caplog.text
    assert (run / "plan.csv").exists()
    (told,) = Path("logged").rglob("hparams.yaml")
    assert (
        yaml.safe_load(told.read_text())["plan"]["stage_times_s"] == plan.details["stage_times_s"]
    )

    # The same by the task that partitions, from the same profile.
    apart = job(*MODEL, *TWO, "task=partition", "task.bandwidth_bytes_per_s=1e4",
                f"task.profiles={{{measured_device(measured)}: {measured}}}")  # fmt: skip
    assert Plan.from_json((apart / "plan.json").read_text()) == plan

    # Another training by another search: the profile is there.
    before_ns = measured.stat().st_mtime_ns
    config = composed(*settings, "parallel=exact", "seed=1", "optim.optimizer.lr=0.003")
    plan_run(config, RunDir(Path("again")), run_job=run_job)
    again = read_json("again/plan.json")
    assert again["profiles"] == plan.details["profiles"]
    assert again["strategy"] == "exact"
    assert profiles() == [measured]
    assert measured.stat().st_mtime_ns == before_ns


def measured_device(path: Path) -> str:
    return str(read_json(path)["meta"]["device"])


def test_a_plan_that_is_there_is_kept(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    config = composed(*MODEL, *TWO, "parallel=hete_mp", SLOW, given(tmp_path, profile([1, 1, 1])))
    plan_run(config, directory)
    before = directory.plan.read_text()
    config = composed(*MODEL, *TWO, "parallel=hete_mp")  # would measure device and link
    plan_run(config, directory, run_job=run_job)
    assert directory.plan.read_text() == before
    assert not Path("outputs").exists()


@pytest.mark.full
def test_a_run_that_has_begun_keeps_its_plan(tmp_path: Path, job: Job) -> None:
    settings = (*MODEL, *TWO, *QUICKLY, SLOW, "parallel=hete_mp", fault([(20, 0)]))
    with pytest.raises(Exception, match="somebody's own mistake"):
        job(*settings)
    (run,) = [path.parent for path in Path("outputs/tiny").glob("*/plan.json")]
    found = json.loads((run / "plan.json").read_text())
    other = Plan.of(config="1-1", cuts=[1 if found["stages"][0]["layers"][1] else 2], num_layers=4)
    stages = json.loads(other.to_json())["stages"]
    names = [name for stage in found["stages"] for name in stage["devices"]]
    for stage, name in zip(stages, names, strict=True):
        stage["devices"] = [name]
    (run / "plan.json").write_text(json.dumps({**found, "stages": stages}))
    shutil.rmtree("outputs/profiles")
    assert job(*settings) == run.absolute()
    assert read_json(run / "result.json")["plan_cuts"] == list(other.cuts)
    assert not profiles()


def test_given_profiles_are_what_the_search_goes_by(tmp_path: Path) -> None:
    """The first layer takes as long as all others, so that the cut is behind it."""
    slow_first = given(tmp_path, profile([3, 1, 1, 1], parameter_bytes=1e6))
    config = composed(
        *MODEL, *TWO, "parallel=mp", "parallel.search.bandwidth_bytes_per_s=1e6", slow_first
    )
    directory = RunDir(tmp_path)
    plan_run(config, directory, run_job=run_job)
    plan = Plan.from_json(directory.plan.read_text())
    assert (plan.config, plan.cuts) == ("1-1", (1,))
    assert plan.details["bottleneck_s"] == pytest.approx(3)
    assert (plan.details["strategy"], plan.details["measured"]) == ("mp", {})
    assert not profiles()


def test_a_synchronous_pipeline_is_planned_as_well(tmp_path: Path) -> None:
    plans = []
    for asked in (["parallel=gpipe", "parallel.search.search=hete_mp"], ["parallel=hete_mp"]):
        config = composed(*MODEL, *TWO, *asked, SLOW, given(tmp_path, profile([1, 1, 1, 3])))
        directory = RunDir(tmp_path / asked[0])
        plan_run(config, directory)
        plans.append(Plan.from_json(directory.plan.read_text()))
    assert plans[0] == plans[1]
    assert plans[0].config == "1-1"


def test_a_plan_from_a_profile_of_other_layers_is_refused(tmp_path: Path) -> None:
    from tests.support.tinyhouse import VectorData

    three = given(tmp_path, profile([1, 1, 1]))
    config = composed(*MODEL, *TWO, "parallel=hete_mp", SLOW, three)
    directory = RunDir(tmp_path)
    plan_run(config, directory)
    with pytest.raises(PlanError, match="covers 3 layers, but the model has 4"):
        resolved(config, directory=directory).build_module(VectorData())


@pytest.mark.full
def test_a_link_without_a_bandwidth_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(*settings: str) -> dict[str, Any]:
        flat = given(tmp_path, profile([1, 1, 1, 1]))
        config = composed(*MODEL, *TWO, "parallel=hete_mp", flat, *settings)
        directory = RunDir(tmp_path / f"run with {len(settings)} settings")
        plan_run(config, directory, run_job=run_job)
        return dict(read_json(directory.plan))

    with caplog.at_level("INFO", logger="sparsepipe"):
        found = plan()
    (measured,) = Path("outputs/links").glob("*/bandwidth.json")
    (link,) = read_json(measured)["hosts"].values()
    assert found["bandwidth_bytes_per_s"] == link["bytes_per_s"] > 0
    assert found["measured_bandwidth"] == str(measured.absolute())
    assert f"and {link['bytes_per_s'] / 1e6:.4g} MB/s" in caplog.text
    # It belongs to the hardware: a training of another model finds it.
    again = plan("model.width=32", "data.batch_size=4", "optim=adamw", "seed=1")
    assert again["measured_bandwidth"] == found["measured_bandwidth"]
    assert len(list(Path("outputs/links").glob("*/bandwidth.json"))) == 1


REMOTE: dict[str, Any] = {
    "hosts": [
        {"name": "here", "devices": [{"name": "core", "count": 1, "accelerator": "cpu"}]},
        {"name": "there", "devices": [{"name": "other core", "count": 1, "accelerator": "cpu"}]},
    ]
}


def test_devices_elsewhere_are_not_measured(tmp_path: Path) -> None:
    profile([1, 1, 1, 1]).save(tmp_path / "core.json")
    config = composed(
        *MODEL, "parallel=hete_mp", "parallel.num_nodes=2",
        f"parallel.search.profiles={{core: {tmp_path / 'core.json'}}}",
    )  # fmt: skip
    with pytest.raises(ProfileError, match="no profile of mlp on other core") as refused:
        plan_run(config, RunDir(tmp_path), Inventory.from_dict(REMOTE))
    assert "sparsepipe task=profile" in refused.value.remedy
    assert "profile: {mlp: ...}" in refused.value.remedy
    both = {name: str(tmp_path / "core.json") for name in ("core", "other core")}
    config = config.replace({"parallel.search.profiles": both})
    with pytest.raises(HardwareError, match="no bandwidth is given for the link between") as slow:
        plan_run(config, RunDir(tmp_path), Inventory.from_dict(REMOTE))
    assert "parallel.search.bandwidth_bytes_per_s" in slow.value.remedy


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ((SLOW, "parallel.devices=1"), ConfigError, ["devices=1", "all 2 devices", "auto"]),
        ((SLOW, "OTHER"), ProfileError, ["another model: cnn, not mlp", "model=cnn"]),
        ((SLOW, "GIVEN", "parallel.search.reserved_bytes=1e15"), PlanError, ["no plan fits"]),
        ((SLOW, "task=profile"), ConfigError, ["runs as one process", "parallel=single"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_refused(
    tmp_path: Path, job: Job, settings: tuple[str, ...], error: type[SparsePipeError],
    words: list[str],
) -> None:  # fmt: skip
    files = {
        "GIVEN": profile([1, 1, 1, 1]),
        "OTHER": profile([1, 1, 1, 1], model="cnn"),
    }
    named = [given(tmp_path, files[name]) if name in files else name for name in settings]
    with pytest.raises(error) as refused:
        job(*MODEL, *TWO, "parallel=hete_mp", *named)
    assert all(word in str(refused.value) for word in words), refused.value
    assert not list(Path("outputs").glob("tiny/*/plan.json"))  # nothing to go on with


@pytest.mark.full
def test_evaluating_by_a_search(job: Job) -> None:
    settings = (*MODEL, *TWO, *QUICKLY, SLOW, "parallel=hete_mp")
    run = job(*settings)
    shutil.rmtree("outputs/profiles")
    evaluated = job(*settings, "task=evaluate", f"checkpoint={run}")
    found = read_json(evaluated / "result.json")
    assert not profiles()
    assert (evaluated / "plan.json").read_text() == (run / "plan.json").read_text()
    trained = read_json(run / "result.json")
    assert found["plan_strategy"] == "hete_mp"
    assert found["test/loss"] == pytest.approx(trained["test/loss"], rel=1e-6)


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


def wanted() -> RunSpec:
    return profile_spec(composed(*TRAINING), device(), HOW)


def profile_run() -> RunDir:
    """The run that measures for the training, before anybody has begun it."""
    return run_directory(wanted())


def finish(directory: RunDir) -> Path:
    """Does what a run that measures does."""
    directory.open(wanted())
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
    assert "measuring took" in told
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
    said = f"while measuring {device()}: a profile cannot be measured from so few batches (0)"
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
