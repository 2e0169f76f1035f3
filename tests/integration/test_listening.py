"""Where each kind of run listens, and how all of its processes end with one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.command_line import Shell, fault, orphans, wait_for
from tests.support.emulated_cases import hosts
from tests.support.listening import address_for_others, listening, processes_in
from tests.support.namespace_cases import needs_namespaces
from tests.support.paths import environment
from tests.support.waiting import held_port

WAITING = "callbacks={step: {_target_: tests.support.tinyhouse.LongStep, step: 2}}"
PIPELINE = ("parallel.plan.config=1-1", "parallel.plan.cuts=[2]")
LOOPBACK = {"127.0.0.1"}
NO_INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}


def started(cwd: Path, variables: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def found_in_step(cwd: Path, *processes: subprocess.Popen[str], ranks: int) -> set[str]:
    """Where all processes of a run listen while it is in its third step; ends the run."""
    try:
        marks = [cwd / f"in-step-{rank}" for rank in range(ranks)]
        wait_for(
            lambda: (
                any(mark.exists() for mark in marks)
                or any(process.poll() is not None for process in processes)
            )
        )
        for process in processes:
            assert process.poll() is None, process.communicate()
        return listening(processes_in(cwd))
    finally:
        for process in processes:
            end(process)
        orphans(cwd)


def found_all_along(cwd: Path, process: subprocess.Popen[str]) -> set[str]:
    """Where all processes of a run have listened from its begin to its end, which is a good one."""
    found = set()
    try:
        while process.poll() is None:
            found |= listening(processes_in(cwd))
            time.sleep(0.02)
        assert process.returncode == 0, process.communicate()
    finally:
        end(process)
        orphans(cwd)
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("parallel=single",), set()),
        (("parallel=dp", "parallel.devices=2"), LOOPBACK),
        (("parallel=pipeline", *PIPELINE), LOOPBACK),
        (("parallel=gpipe", *PIPELINE), LOOPBACK),
    ],
    ids=lambda settings: settings[0] if isinstance(settings, tuple) else "",
)
def test_a_run_of_one_machine(shell: Shell, settings: Sequence[str], expected: set[str]) -> None:
    """With loader workers and a tracker."""
    process = shell.start(
        "hardware=cores", *settings, "data.num_workers=1", "logger=wandb", WAITING
    )
    assert found_in_step(shell.cwd, process, ranks=2) == expected


HOST = "{{name: {}, devices: [{{name: core, count: 1, accelerator: cpu}}]}}"
HOSTS = f"hardware.value.hosts=[{HOST.format('a')},{HOST.format('b')}]"
DP = ("hardware=cores", "parallel=dp", "parallel.devices=2")


@pytest.mark.full
def test_the_command_under_torchrun(shell: Shell, entry_point: Mapping[str, str]) -> None:
    process = started(shell.cwd, entry_point, *TORCHRUN, "-m", *shell.command(*DP))
    assert found_all_along(shell.cwd, process) == LOOPBACK


@pytest.mark.full
def test_several_hosts(shell: Shell, entry_point: Mapping[str, str]) -> None:
    """Two agents, as on two hosts, meet at an address of this one that others reach as well."""
    outer = address_for_others()
    with held_port() as port:
        place = f"{outer}:{port}"
    here = shell.command("hardware=cores", HOSTS, "parallel=dp", "parallel.num_nodes=2", WAITING)
    agents = [
        started(
            shell.cwd, entry_point, *TORCHRUN[:2], "--nnodes=2", "--nproc-per-node=1",
            "--rdzv-backend=sparsepipe", f"--rdzv-endpoint={place}",
            f"--rdzv-conf=rank={number}", "-m", *here,
        )
        for number in range(2)
    ]  # fmt: skip
    assert found_in_step(shell.cwd, *agents, ranks=2) == {outer}


@pytest.mark.full
@needs_namespaces
def test_an_emulated_cluster(shell: Shell) -> None:
    """Its hosts are networks of their own within the machine, with addresses of no other."""
    process = shell.start(
        *hosts(shell.cwd, bytes_per_s=20e6), "parallel=pipeline", "parallel.plan.config=1-2",
        "parallel.plan.cuts=[2]", WAITING,
    )  # fmt: skip
    found = found_in_step(shell.cwd, process, ranks=3)
    assert found
    assert all(address.startswith(("10.77.0.", "198.18.", "198.19.")) for address in found)


SCRIPT = """
import sys
import pytorch_lightning as pl
from sparsepipe.strategies import DataParallelStrategy
from tests.support.pipeline_cases import QUIET, make_loader, make_net, pipeline_trainer
from tests.support.tinyhouse import LongStep

options = {"max_epochs": 1, "callbacks": [LongStep(step=2)]}
if sys.argv[1] == "dp":
    trainer = pl.Trainer(**QUIET, devices=2, strategy=DataParallelStrategy(), **options)
else:
    trainer = pipeline_trainer("1-1", [3], **options)
trainer.fit(make_net("dense"), make_loader("dense", batches=8))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=sparsepipe",
            "--rdzv-endpoint=localhost:0")  # fmt: skip


@pytest.fixture
def entry_point(tmp_path: Path) -> Mapping[str, str]:
    """The installed entry point, also where a checkout of another state is installed."""
    place = tmp_path / "site" / "handlers-1.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: handlers\nVersion: 1\n")
    (place / "entry_points.txt").write_text(
        "[torchrun.handlers]\nsparsepipe = sparsepipe.runtime.rendezvous:torchrun_handler\n"
    )
    known = environment(**NO_INTERFACES)
    return {**known, "PYTHONPATH": os.pathsep.join((str(place.parent), known["PYTHONPATH"]))}


@pytest.mark.full
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["Lightning", "torchrun"])
@pytest.mark.parametrize("kind", ["dp", "pipeline"])
def test_a_script(
    tmp_path: Path, entry_point: Mapping[str, str], launcher: Sequence[str], kind: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = started(tmp_path, entry_point, *launcher, "script.py", kind)
    assert found_in_step(tmp_path, process, ranks=2) == LOOPBACK


PLANS = {
    "dp": ("parallel=dp", "parallel.devices=2"),
    "asynchronous": ("parallel=pipeline", *PIPELINE),
    "synchronous": ("parallel=gpipe", *PIPELINE),
}
LATE = {"dp": 6, "asynchronous": 12, "synchronous": 12}
"""A step of the last epoch, in which ranks of a pipeline agree too late to stop before its end."""
LIMIT_S = 2.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("late", "signum"), [(False, signal.SIGINT), (True, signal.SIGINT), (False, signal.SIGTERM)]
)
@pytest.mark.parametrize("plan", PLANS)
def test_a_signal_to_one_rank_ends_all(shell: Shell, plan: str, late: bool, signum: int) -> None:
    step = LATE[plan] if late else 2
    settings = ("hardware=cores", *PLANS[plan], fault([(step, signum)], rank=1))
    done = shell(*settings)
    name = signal.Signals(signum).name
    assert done.code == 128 + signum, done.err
    assert done.err.splitlines()[-1].startswith(f"stopped by {name}; run the same command again")
    (run,) = shell.runs()
    assert not (run / "DONE.json").exists()
    assert (run / "checkpoints" / "last.ckpt").exists()
    assert shell(*settings).run == run, "it goes on"


def left_after(process: subprocess.Popen[str], cwd: Path, *, ready: Sequence[Path]) -> list[int]:
    """What still runs in a directory two seconds after the first process was killed there."""
    try:
        wait_for(lambda: any(mark.exists() for mark in ready) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        assert processes_in(cwd)
        process.kill()
        deadline_s = time.monotonic() + LIMIT_S
        while (left := processes_in(cwd)) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return left
    finally:
        process.kill()
        for pid in processes_in(cwd):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp", "asynchronous"])
def test_ranks_end_with_their_launcher(shell: Shell, plan: str) -> None:
    """In a step that lasts minutes, with loader workers."""
    waiting = "callbacks={step: {_target_: tests.support.tinyhouse.LongStep, step: 2}}"
    process = shell.start("hardware=cores", *PLANS[plan], "data.num_workers=1", waiting)
    assert not left_after(process, shell.cwd, ready=[shell.cwd / f"in-step-{r}" for r in (0, 1)])


@pytest.mark.full
def test_ranks_end_with_a_launcher_that_is_killed_early(shell: Shell) -> None:
    """Before they have imported torch, which takes seconds."""
    process = shell.start("hardware=cores", *PLANS["dp"])

    def ranks() -> bool:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
        return sum(b"sparsepipe.launch.worker" in command for command in commands) == 2

    wait_for(ranks)
    here = shell.cwd / "here"
    here.touch()
    time.sleep(0.3)  # for Python itself to begin
    assert not left_after(process, shell.cwd, ready=[here])


@pytest.mark.full
@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")],
    ids=["Lightning", "torchrun"],
)
def test_ranks_of_a_script_end_with_what_has_started_them(
    tmp_path: Path, launcher: Sequence[str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = started(tmp_path, environment(), *launcher, "script.py", "dp")
    assert not left_after(process, tmp_path, ready=[tmp_path / "in-step-1"])
