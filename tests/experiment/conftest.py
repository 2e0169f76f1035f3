"""The command line as users meet it: real processes in an empty directory."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SUPPORT = Path(__file__).parent / "support"
_HERE = ("--config-dir", str(SUPPORT / "conf"), "experiment=tiny")


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def run(self) -> Path:
        """The run directory, which is the last line of stdout."""
        assert self.code == 0, self.err
        return Path(self.out.splitlines()[-1])


@dataclass(frozen=True)
class Shell:
    """A directory to work in, and the command."""

    cwd: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SPARSEPIPE")},
            "PYTHONPATH": str(SUPPORT),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "sparsepipe", *_HERE, *arguments],
            cwd=self.cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments: str, timeout_s: float = 120) -> Finished:
        return self.wait(self.start(*arguments), timeout_s=timeout_s)

    def wait(self, process: subprocess.Popen[str], *, timeout_s: float = 120) -> Finished:
        out, err = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, out, err)

    def runs(self) -> list[Path]:
        """All run directories of the experiment."""
        return sorted(path.parent for path in self.cwd.glob("outputs/*/*/config.yaml"))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    yield Shell(tmp_path)
    assert not orphans(tmp_path), "processes were left behind"


def orphans(cwd: Path) -> list[str]:
    """Command lines of processes that work in ``cwd``; waits a little for them to end."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "cwd").resolve() == cwd.resolve():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended while we looked
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def kill_group(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the command itself, as the kernel does it; ranks have their own groups."""
    os.kill(process.pid, signal.SIGKILL)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as stream:
        return list(csv.DictReader(stream))


def checkpoint(run: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=False)


def weights(run: Path) -> torch.Tensor:
    state = checkpoint(run)["state_dict"]
    return torch.cat([v.double().reshape(-1) for k, v in state.items() if k.startswith("layers")])
