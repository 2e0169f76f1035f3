"""Where each kind of run listens: on the loopback, unless its hosts need more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.command_line import Shell, orphans, wait_for
from tests.support.emulated_cases import hosts
from tests.support.listening import listening, processes_in
from tests.support.namespace_cases import needs_namespaces
from tests.support.paths import environment

WAITING = "callbacks={step: {_target_: tests.support.tinyhouse.LongStep, step: 2}}"
PIPELINE = ("parallel.plan.config=1-1", "parallel.plan.cuts=[2]")
LOOPBACK = {"127.0.0.1"}
NO_INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}


def found_in_step(cwd: Path, process: subprocess.Popen[str], *, ranks: int) -> set[str]:
    """Where all processes of a run listen while it is in its third step; ends the run."""
    try:
        marks = [cwd / f"in-step-{rank}" for rank in range(ranks)]
        wait_for(lambda: any(mark.exists() for mark in marks) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        return listening(processes_in(cwd))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        orphans(cwd)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        ("parallel=single",),
        ("parallel=dp", "parallel.devices=2"),
        ("parallel=pipeline", *PIPELINE),
        ("parallel=gpipe", *PIPELINE),
    ],
    ids=lambda settings: settings[0],
)
def test_a_run_of_one_machine(shell: Shell, settings: Sequence[str]) -> None:
    """With loader workers and a tracker."""
    process = shell.start(
        "hardware=cores", *settings, "data.num_workers=1", "logger=wandb", WAITING
    )
    assert found_in_step(shell.cwd, process, ranks=2) <= LOOPBACK


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
    process = subprocess.Popen(
        [sys.executable, *launcher, "script.py", kind],
        cwd=tmp_path,
        env=entry_point,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert found_in_step(tmp_path, process, ranks=2) == LOOPBACK
