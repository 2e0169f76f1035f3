"""Trainings that are refused before anything is prepared: what is cut into too many parts, say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sparsepipe.errors import ConfigError
from sparsepipe.launch.prepare import (
    prepare,
    refuse_empty_microbatches,
    refuse_few_microbatches,
    resolve_run,
)
from sparsepipe.runs.rundir import RunDir
from sparsepipe.schedule import Plan
from sparsepipe.sweep import callbacks
from sparsepipe.tasks.emulate import as_emulated
from sparsepipe.utils.files import read_json
from sparsepipe.utils.host import usable_cores
from tests.support.command_line import Shell, composed
from tests.support.control_groups import quota_group
from tests.support.emulated_cases import hosts
from tests.support.planned_cases import MODEL, SLOW, TWO, given, profile
from tests.support.plans import plan_on
from tests.support.resolved import plan_run, resolved, run_directory

CUT = "parallel.strategy.microbatches="
STRAIGHT, BOTH = "parallel.plan.config=1-1", "parallel.plan.config=2"
SEARCH = "parallel.search.search="
SEARCHED = f"{SEARCH}hete_mp"
SECOND = "parallel.strategy.recompute={stages: [1]}"  # which a plan has to have


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("trainer.trace=true", "trainer.trace=true records the stages of a pipeline", "gpipe"),
        ("input=part.stl", "input is set, but task=train does not read it", "task=predict"),
    ],
)
def test_settings_of_other_trainings_are_refused_first(
    override: str, message: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        resolve_run(composed("experiment=tiny", override))
    assert remedy in refused.value.remedy
    resolve_run(composed("experiment=tiny", "parallel=gpipe", "trainer.trace=true"))


@pytest.mark.parametrize("package", ["mlflow", "tensorboard"])
def test_a_logger_without_its_package_is_refused_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == package else found(name, *more),
    )
    with pytest.raises(ConfigError, match=f"{package}, which is not installed") as refused:
        resolve_run(composed("experiment=tiny", f"logger=[csv,{package}]"))
    assert f"pip install 'sparsepipe[{package}]'" in refused.value.remedy


@pytest.mark.parametrize(
    ("stages", "parts", "readers"),
    [
        *(((STRAIGHT,), 3, 1), ((), 4, 1), ((BOTH,), 5, 2), ((SEARCHED,), 5, 2)),
        *(((f"{SEARCH}straight",), 3, 1), ((SEARCHED, SECOND), 3, 1)),
    ],
)
def test_refused_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: tuple[str, ...],
    parts: int,
    readers: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = composed(*MODEL, *TWO, "parallel=gpipe", *stages, f"{CUT}{parts}")
    with pytest.raises(ConfigError) as refused:
        run_directory(config)
    each = "" if readers == 1 else " on each of 2 devices"
    assert f"data.batch_size=2{each} is too small" in refused.value.message
    assert f"microbatches={parts}: some would be empty" in refused.value.message
    assert f"to {2 * readers} or fewer" in refused.value.remedy


def test_a_plan_that_a_search_has_found_says_how_many_devices_read(tmp_path: Path) -> None:
    config = composed(*MODEL, *TWO, "parallel=gpipe", SEARCHED, f"{CUT}4")
    directory = RunDir(tmp_path)
    directory.plan.write_text(Plan.of(config="2", cuts=[], num_layers=4).to_json())
    refuse_empty_microbatches(resolved(config, directory=directory))
    directory.plan.write_text(Plan.of(config="1-1", cuts=[2], num_layers=4).to_json())
    with pytest.raises(ConfigError, match=r"data\.batch_size=2 is too small"):
        refuse_empty_microbatches(resolved(config, directory=directory))


def test_a_search_finds_a_plan_whose_microbatches_all_have_samples(tmp_path: Path) -> None:
    """On so slow a link two stages would be faster, the first of which reads two samples."""
    measured = profile([1, 1, 1, 1])
    measured = replace(measured, meta={**measured.meta, "batch_size": 2})
    asked = (*MODEL, *TWO, "parallel=gpipe", SEARCHED, SLOW, f"{CUT}4", given(tmp_path, measured))
    config, directory = composed(*asked), RunDir(tmp_path / "run")
    plan_run(config, directory)
    assert Plan.from_json(directory.plan.read_text()).config == "2"
    refuse_empty_microbatches(resolved(config, directory=directory))


def test_what_trains_on_no_batches_of_data_is_not_refused(tmp_path: Path) -> None:
    cut = ("parallel=gpipe", STRAIGHT, f"{CUT}9", "data.batch_size=2")
    emulated = as_emulated(composed(*hosts(tmp_path, slow=1), *cut))
    refuse_empty_microbatches(resolved(emulated.replace({"parallel.devices": 2})))
    refuse_empty_microbatches(resolved(composed("experiment=tiny", "task=evaluate", *TWO, *cut)))
    with pytest.raises(ConfigError):  # what does train on them is refused for the same
        refuse_empty_microbatches(resolved(composed(*MODEL, *TWO, *cut)))


pytestmark = pytest.mark.usefixtures("workplace")
ON = ("experiment=tiny", "hardware=cores")
PARTS = "parallel.strategy.microbatches"


@pytest.mark.parametrize(
    ("plan", "most", "stage"),
    [
        (("parallel.plan.config=1-3-2",), 3, 1),
        (("parallel.plan.config=3-1", "parallel.plan.cuts=[2]"), 3, 0),
        (("parallel.plan.config=4",), 4, 0),
    ],
)
def test_a_plan_by_hand(plan: tuple[str, ...], most: int, stage: int) -> None:
    def asked(count: int) -> int:
        return resolve_run(composed(*ON, "parallel=sync_1f1b", *plan, f"{PARTS}={count}")).ranks

    with pytest.raises(ConfigError) as refused:
        asked(most - 1)
    told = f"{PARTS}={most - 1} is less than {most}, the number of devices of stage {stage}"
    assert refused.value.message.startswith(told)
    assert f"set {PARTS} to at least {most}" in refused.value.remedy
    assert asked(most) >= most


def test_a_plan_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan_on(["test/core/0", "test/core/1"]).to_json())
    given = (*ON, "parallel=gpipe", f"parallel.plan.file={tmp_path / 'plan.json'}")
    with pytest.raises(ConfigError, match="less than 2, the number of devices of stage 0"):
        resolve_run(composed(*given, f"{PARTS}=1"))
    assert resolve_run(composed(*given, f"{PARTS}=2")).ranks == 2


def test_a_plan_that_a_search_has_found(tmp_path: Path) -> None:
    """As one that does not look at it, ``mp`` by levels: refused before ranks start."""
    config = composed(*ON, "parallel=gpipe", f"{PARTS}=1", "parallel.search.search=mp")
    refuse_few_microbatches(resolved(config, directory=RunDir(tmp_path)))
    (tmp_path / "plan.json").write_text(plan_on([f"test/core/{n}" for n in range(8)]).to_json())
    with pytest.raises(ConfigError, match=rf"^{PARTS}=1 is less than 8, the number of devices"):
        refuse_few_microbatches(resolved(config, directory=RunDir(tmp_path)))


VARIABLE, ANNOUNCED = "OMP_NUM_THREADS", "SPARSEPIPE_SWEEP_THREADS"
SOME, OTHERS = (str(usable_cores() + more) for more in (1, 2))
"""Threads that nobody has who says nothing."""
Identify = Callable[..., str]


@pytest.fixture
def run_id(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Identify:
    """Of a run on the processor, where variables say something of threads."""

    def identify(*overrides: str, said: str | None, announced: str | None = None) -> str:
        for name, value in ((VARIABLE, said), (ANNOUNCED, announced)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        words = ("experiment=tiny", "hardware.accelerator=cpu", *overrides)
        return prepare(resolve_run(composed(*words))).directory.run_id

    return identify


def test_what_the_user_says_makes_another_run(run_id: Identify) -> None:
    unsaid, some, others = (run_id(said=said) for said in (None, SOME, OTHERS))
    assert len({unsaid, some, others}) == 3
    assert run_id(said="") == unsaid
    assert run_id(said=f" {SOME}") == some
    assert run_id(said=str(usable_cores())) == unsaid, "it is so anyhow"


def test_a_job_of_a_sweep_is_the_run_that_a_single_command_makes(run_id: Identify) -> None:
    """Whatever its launcher says to it of threads so that jobs share the cores."""
    assert run_id(said=SOME, announced="") == run_id(said=None)
    assert run_id(said=SOME, announced=OTHERS) == run_id(said=OTHERS)


def test_all_cores_of_a_job_are_a_part_of_the_machine(run_id: Identify) -> None:
    """Whose other cores it does not see."""
    told = str(usable_cores())
    assert run_id(said=told, announced=told) not in (run_id(said=None), run_id(said=SOME))


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel=dp", "hardware.cpu_devices=2"),  # who share the cores, as a launcher says
        ("task=fit_batch",),  # what is kept in memory does not depend on it
        ("task=report", "task.exhibits=[table2]"),  # of figures that are there
    ],
)
def test_threads_that_do_not_count(run_id: Identify, overrides: tuple[str, ...]) -> None:
    assert run_id(*overrides, said=SOME) == run_id(*overrides, said=None)


@pytest.fixture
def sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep has begun in this process, maybe in a job of another."""
    for name in ("DIR", "COMMAND", "BEGAN", "THREADS"):
        monkeypatch.setenv(f"SPARSEPIPE_SWEEP_{name}", "")  # which a sweep sets, and is set back
    monkeypatch.setattr(callbacks, "_running", [])
    hydra = {"sweep": {"dir": str(tmp_path)}, "overrides": {"task": []}, "job": {"env_set": {}}}
    callbacks.SweepEnd().on_multirun_start(OmegaConf.create({"hydra": hydra}))


@pytest.mark.usefixtures("sweeping")
def test_another_launcher_computes_with_the_threads_that_it_says(run_id: Identify) -> None:
    """As joblib, which gives each of its processes a part of the cores."""
    told = os.environ.get(ANNOUNCED)
    some, others, unsaid = (run_id(said=said, announced=told) for said in (SOME, OTHERS, None))
    assert len({some, others, unsaid}) == 3
    assert some == run_id(said=SOME), "the single command's"


UNSAID = ("env", "-u", VARIABLE)
LIMITED = """
import torch
from sparsepipe.launch.execute import limit_threads
from tests.support.resolved import plan_run, run_directory
limit_threads()
print(torch.get_num_threads())
"""


@pytest.mark.full
@pytest.mark.skipif(usable_cores() < 2, reason="one core is no less with a quota")
def test_a_quota_limits_the_threads_that_nobody_has_chosen() -> None:
    with quota_group(0.5) as within:
        for said, threads in ((UNSAID, "1\n"), (("env", f"{VARIABLE}=2"), "2\n")):
            command = [*within, *said, sys.executable, "-c", LIMITED]
            found = subprocess.run(command, check=True, capture_output=True, text=True)
            assert found.stdout == threads


@pytest.mark.full
@pytest.mark.skipif(usable_cores() < 2, reason="one core is no less with a quota")
def test_a_run_alone_keeps_to_a_quota(tmp_path: Path) -> None:
    with quota_group(0.5) as within:
        done = Shell(tmp_path, before=(*within, *UNSAID))("parallel=single", "trainer.max_epochs=1")
    result = read_json(done.run / "result.json")
    assert (result["ranks"], result["threads_per_rank"], result["machine_cores"]) == (1, 1, 1)
