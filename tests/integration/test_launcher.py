"""Sweeps through our launcher: real jobs in processes of their own."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import re
import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydra_plugins.sparsepipe_launcher import SparsePipeLauncher, SparsePipeLauncherConf
from sparsepipe.errors import ConfigError
from sparsepipe.runs.ledger import load_results
from sparsepipe.runs.lock import locked
from sparsepipe.runs.rundir import RunDir
from sparsepipe.sweep.launch import launch
from sparsepipe.sweep.record import JobRecord, records_of
from sparsepipe.sweep.slots import Settings
from sparsepipe.utils.files import read_json
from sparsepipe.utils.host import usable_cores
from tests.support.command_line import (
    Finished,
    Shell,
    composed,
    fault,
    orphans,
    wait_for,
)
from tests.support.control_groups import memory_group

OURS = "hydra/launcher=sparsepipe"
ONE_EPOCH = "trainer.max_epochs=1"
BESIDE = "hydra.launcher.cores_per_rank=1"
STUCK = (
    "callbacks={stuck: {_target_: tests.support.tinyhouse.LongStep, step: 1}}",
    "parallel.grace_s=1",
)
CPU = "hardware.accelerator=cpu"
LIMIT_S = 280  # of a sweep of some jobs, where other tests run beside it


def records(shell: Shell) -> list[JobRecord]:
    (sweep,) = shell.cwd.glob("outputs/*/sweeps/*")
    return records_of(sweep)


def table(shell: Shell) -> list[dict[str, str]]:
    (found,) = shell.cwd.glob("outputs/*/sweeps/*/table.csv")
    with found.open() as stream:
        return list(csv.DictReader(stream))


def logs(shell: Shell) -> list[Path]:
    (sweep,) = shell.cwd.glob("outputs/*/sweeps/*")
    return [sweep / "jobs" / str(number) / "log.txt" for number in range(3)]


def choices(*callbacks: str) -> str:
    """An override that sweeps over callbacks."""
    return "callbacks=" + ",".join(item.removeprefix("callbacks=") for item in callbacks)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_goes_wrong_with_some_jobs(shell: Shell) -> None:
    """Refused before it starts, raises, killed by somebody: the others are done, and it is told."""
    broken = choices(fault([(1, 0)]), fault([(2, signal.SIGKILL)]), "{}")
    swept = shell.sweep(OURS, ONE_EPOCH, broken, "seed=0,-1", timeout_s=LIMIT_S)
    raised, refused, killed, _, done, _ = records(shell)
    assert [record.status for record in records(shell)] == [
        "failed", "failed", "failed", "failed", "finished", "failed",
    ]  # fmt: skip
    assert swept.code == 1, "the first one's"
    assert swept.out == f"{done.run}\n", "and nothing else"
    assert (raised.error or "").startswith("ValueError: somebody's own mistake")
    assert "'seed' must be greater than or equal to 0, not -1" in (refused.error or "")
    assert refused.exit_code == 2
    assert "OOM killer" in (killed.error or "")
    assert killed.exit_code == 128 + signal.SIGKILL
    assert "6 jobs, 5 of them failed" in swept.err
    assert [row["status"] for row in table(shell)].count("finished") == 1
    end = swept.err.partition("5 of 6 jobs failed:")[2]
    assert end.index("job 1 (") < end.index("job 2 (") < end.index("job 3 (")
    assert "  | ValueError: somebody's own mistake" in end, "its log's tail"
    assert "jobs/0/log.txt" in end


@pytest.mark.full
@pytest.mark.timeout(900)
def test_jobs_that_are_the_same_run_are_one(shell: Shell) -> None:
    """Also where their settings differ in what changes nothing, and all are to start anew."""
    name = "trainer.log_every_n_steps"
    same = (OURS, BESIDE, ONE_EPOCH, CPU)
    swept = shell.sweep(*same, f"{name}=1,2,2", timeout_s=LIMIT_S)
    assert swept.code == 0, swept.err
    (run,) = shell.runs()
    assert swept.out == 3 * f"{run}\n"
    assert [record.run for record in records(shell)] == 3 * [str(run)]
    assert sum(path.exists() for path in logs(shell)) == 2, "the third was the second"
    assert RunDir(run).attempt == 0
    first = read_json(run / "DONE.json")["time"]
    settings = {key for key in read_json(run / "result.json") if key.startswith("hardware.")}
    forced = shell.sweep(*same, f"{name}=1,2,2", "force=true", timeout_s=LIMIT_S)
    assert forced.code == 0, forced.err
    assert RunDir(run).attempt == 1, "anew once, not by each of them"
    assert read_json(run / "DONE.json")["time"] > first
    # The command without a sweep finds it as well: a part of the machine makes it no other run.
    assert shell(ONE_EPOCH, CPU).run == run
    assert shell.runs() == [run]
    # Nor does it have another row: what it was told of the machine is no setting of it.
    assert settings == {
        key for key in composed("experiment=tiny", CPU).flat() if key.startswith("hardware.")
    }


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_job_has_as_many_processes_as_it_needs(shell: Shell) -> None:
    """World sizes mixed in one sweep, on a machine of fewer cores than the largest wants."""
    present = "callbacks={present: {_target_: tests.support.tinysweep.Present}}"
    swept = shell.sweep(
        OURS, BESIDE, ONE_EPOCH, present, "parallel=dp", "parallel.devices=1,4",
        "hardware=cores", timeout_s=LIMIT_S,
    )  # fmt: skip
    assert swept.code == 0, swept.err
    processes = set()
    for record in records(shell):
        run = Path(record.run or "")
        asked = int(read_json(run / "result.json")["parallel.devices"])
        told = [path.read_text().split(" ", 2) for path in sorted(run.glob("present-*"))]
        assert len(told) == asked
        assert {size for _, size, _ in told} == {str(asked)}
        victims = [int(path.read_text()) for path in sorted(run.glob("victim-*"))]
        assert len(victims) == asked
        assert min(victims) >= 500, "where memory runs out, none but the sweep is spared"
        processes |= {process for process, _, _ in told}
        cores = {len(json.loads(cores)) for _, _, cores in told}
        assert cores == {min(asked, usable_cores())}, "a core for each rank"
    assert len(processes) == 1 + 4, "of its own each"


def interrupted(shell: Shell, *signums: int) -> Finished:
    """A sweep of two jobs that are stuck beside each other, and hears these signals."""
    sweep = shell.start(OURS, BESIDE, *STUCK, "seed=0,1", "hydra.mode=MULTIRUN")
    wait_for(lambda: len(shell.runs()) == 1 + (usable_cores() > 1))
    wait_for((shell.cwd / "in-step-0").exists)
    for signum in signums:
        sweep.send_signal(signum)
        if signum == signal.SIGINT:
            wait_for((shell.cwd / "heard-0").exists)
    return shell.wait(sweep, timeout_s=LIMIT_S)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_first_ctrl_c_stops_in_order_and_the_second_at_once(shell: Shell) -> None:
    stopped = interrupted(shell, signal.SIGINT, signal.SIGINT)
    assert stopped.code == 130, stopped.err
    assert "run the same command again to go on" in stopped.err
    assert "a second signal ends them at once" in stopped.err
    assert not orphans(shell.cwd)
    statuses = [record.status for record in records(shell)]
    assert statuses[0] == "stopped"
    assert statuses[1] in ("stopped", "not started"), "on one core it never begins"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_nothing_outlives_a_sweep_that_is_killed(shell: Shell) -> None:
    ended = interrupted(shell, signal.SIGKILL)
    assert ended.code == -signal.SIGKILL, ended.err
    assert not orphans(shell.cwd)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_sweep_waits_for_another_command_up_to_its_limit(shell: Shell) -> None:
    first = shell(CPU, ONE_EPOCH)
    with locked(RunDir(first.run)):
        waits = shell.sweep(
            OURS, CPU, ONE_EPOCH, "hydra.launcher.wait_limit_s=1", timeout_s=LIMIT_S
        )
    assert waits.code == ConfigError.exit_code, waits.err
    (waited,) = records(shell)
    assert f"another process is working on {first.run}, for longer than 1 s" in str(waited.error)
    assert f"{first.run}: waiting for it" in Path(waited.log or "").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_jobs": 0}, "hydra.launcher.max_jobs=0"),
        ({"job_limit_s": float("nan")}, "hydra.launcher.job_limit_s=nan"),
        ({"wait_limit_s": 0.0}, "hydra.launcher.wait_limit_s=0.0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings(**settings)
    assert error.value.message == f"{words} is not above 0"


def test_the_launcher_has_the_settings_and_their_values() -> None:
    """It cannot import them: Hydra imports it at the start of every program."""
    known = {field.name: field.default for field in dataclasses.fields(Settings)}
    told = OmegaConf.to_container(OmegaConf.structured(SparsePipeLauncherConf))
    assert told == {**known, "_target_": SparsePipeLauncherConf._target_}
    given = inspect.signature(SparsePipeLauncher).parameters
    assert {name: each.default for name, each in given.items()} == known
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    listed = re.findall(r"^\| `hydra\.launcher\.(\w+)` \| (\S+) \|", text, re.MULTILINE)
    told_there = {name: None if value == "null" else float(value) for name, value in listed}
    assert told_there == known


def test_a_sweep_within_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="with torchrun") as error:
        launch(None, None, [["seed=0"]], first=0, settings=Settings())
    assert "without torchrun" in error.value.remedy


JOB_LIMIT_S = 60  # of a job; those that do not hang need a tenth of it
GROUP_BYTES = 3 * 10**9  # of all processes: several times what any needs but the hungry one
HANGS = "{stuck: {_target_: tests.support.tinyhouse.LongStep, step: 1}}"
HUNGRY = f"{{hungry: {{_target_: tests.support.tinysweep.Hungry, most_bytes: {2 * GROUP_BYTES}}}}}"
RAISES = fault([(1, 0)]).removeprefix("callbacks=")
SWEEP = (
    *(OURS, BESIDE, CPU),
    f"hydra.launcher.job_limit_s={JOB_LIMIT_S}",
    "parallel.grace_s=1",
    "trainer.max_epochs=1",
    f"callbacks={HANGS},{RAISES},{HUNGRY},{{}}",
)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_is_named_and_the_good_one_is_done(shell: Shell) -> None:
    """The kernel itself ends the hungry one: the sweep has no more memory than its group."""
    with memory_group(GROUP_BYTES) as before:
        swept = Shell(shell.cwd, before=before).sweep(*SWEEP, timeout_s=600)
    assert swept.code == 1, swept.err
    (sweep,) = shell.cwd.glob("outputs/tiny/sweeps/*")
    hung, raised, hungry, good = records_of(sweep)
    assert [record.status for record in (hung, raised, hungry)] == 3 * ["failed"]
    assert (good.status, good.exit_code) == ("finished", 0)
    assert swept.out == f"{good.run}\n"
    assert (Path(good.run or "") / "DONE.json").exists()
    assert [hung.exit_code, raised.exit_code, hungry.exit_code] == [1, 1, 128 + signal.SIGKILL]
    told = swept.err.partition("3 of 4 jobs failed:")[2]
    for number, words in (
        (1, f"ended by hydra.launcher.job_limit_s={JOB_LIMIT_S}"),
        (2, "ValueError: somebody's own mistake"),
        (3, "killed by the OOM killer: the machine (or the container) ran out of memory"),
    ):
        section = told.partition(f"\njob {number} (")[2].partition("\njob ")[0]
        assert words in section
        assert f"jobs/{number - 1}/log.txt" in section
    assert "\njob 4 (" not in told
    assert "run fewer at a time (hydra.launcher.max_jobs)" in told
    assert not orphans(shell.cwd)
    assert JOB_LIMIT_S <= hung.ended_s - hung.began_s < JOB_LIMIT_S + 60
    assert list(load_results(shell.cwd / "outputs/tiny/ledger.csv")["run_id"]) == [
        Path(good.run or "").name
    ]
