"""Helpers: the command line as users meet it, and jobs within the test process."""

from __future__ import annotations

import contextlib
import csv
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from sparsepipe.config import compose
from sparsepipe.config.run_spec import RunSpec
from tests.support.paths import CONF, python_path, run_python

_HERE = ("--config-dir", str(CONF), "experiment=tiny")


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
    before: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SPARSEPIPE")}
        return {**inherited, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}

    def command(self, *arguments: str) -> list[str]:
        return ["sparsepipe", *_HERE, *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.before, sys.executable, "-m", *self.command(*arguments)],
            cwd=self.cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def torchrun(
        self, ranks: int, *arguments: str, restarts: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """The command in ranks that torchrun starts, to their end."""
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--max-restarts={restarts}")
        words = (*launcher, f"--nproc_per_node={ranks}", "-m", *self.command(*arguments))
        return run_python(self.cwd, *words, env=self.environment)

    def sweep(self, *arguments: str, timeout_s: float = 240) -> Finished:
        """A multirun; Hydra wants its options before the overrides."""
        return self.wait(self.start(*arguments, "hydra.mode=MULTIRUN"), timeout_s=timeout_s)

    def __call__(self, *arguments: str, timeout_s: float = 240) -> Finished:
        return self.wait(self.start(*arguments), timeout_s=timeout_s)

    def wait(self, process: subprocess.Popen[str], *, timeout_s: float = 240) -> Finished:
        out, err = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, out, err)

    def runs(self) -> list[Path]:
        """All run directories of the experiment."""
        return sorted(path.parent for path in self.cwd.glob("outputs/*/*/config.yaml"))


def composed(*overrides: str) -> RunSpec:
    """The checked configuration, as the command line would make it."""
    with initialize_config_dir(str(compose.config_dir()), version_base="1.3"):
        config = hydra_compose(
            compose.CONFIG_NAME,
            [f"hydra.searchpath=[file://{CONF}]", *compose.admit(overrides)],
        )
    return compose.resolve(config, given=overrides)


def fault(plan: list[tuple[int, int]], **more: object) -> str:
    """An override that lets ``tinyhouse.Fault`` act; ``plan`` pairs steps with signals."""
    pairs = [[step, int(signum)] for step, signum in plan]
    rest = "".join(f", {name}: {value}" for name, value in more.items())
    return f"callbacks={{fault: {{_target_: tests.support.tinyhouse.Fault, plan: {pairs}{rest}}}}}"


def orphans(cwd: Path) -> list[str]:
    """Command lines of processes but this one that work in ``cwd``; waits for them to end."""
    deadline = time.monotonic() + 20
    while True:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            if process.name == str(os.getpid()):
                continue
            try:
                if (process / "cwd").resolve() == cwd.resolve():
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # it ended while we looked
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def wait_for(condition: Callable[[], bool], *, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as stream:
        return list(csv.DictReader(stream))


def checkpoint(run: Path, name: str = "last") -> dict[str, Any]:
    return torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=False)


def weights(run: Path) -> torch.Tensor:
    state = checkpoint(run)["state_dict"]
    return torch.cat([v.double().reshape(-1) for k, v in state.items() if k.startswith("layers")])


@contextlib.contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    """As a full disk does, fails writing in the middle of a larger file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
