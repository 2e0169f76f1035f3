"""Points of a run at which a rank fails, and what is to be seen of it and of the run."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.command_line import Finished, Shell, checkpoint, orphans, rows

TIMEOUT_S = 20  # of the ranks' waits: shorter, and a busy machine's slow start would be a fault
PATIENCE_S = 5  # with ranks that do not end after another one has failed
LEAVING_S = 20  # for processes to end and to be seen ended, on a busy machine
EPOCHS, STEPS = 3, 8

TRAINING = (
    "hardware=cores",
    f"parallel.strategy.timeout_s={TIMEOUT_S}",
    f"trainer.max_epochs={EPOCHS}",
    "model.dropout=0.5",
)
PIPELINE = (*TRAINING, "parallel=pipeline", "model.norm=true")
KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "raises": 0}
SIGNALS = {**KINDS, "cut off": -1}
BLAMED = "(is gone|did not|took nothing|ended|was killed by|is cut off from)"
MEETINGS = {  # what else may be under way where minibatches are not
    "drain": "averaging statistics at a drain|exchanging what was logged",
    "validation": "exchanging what was logged",
    "checkpoint": "putting the stages' states together|the barrier Trainer.save_checkpoint",
}


@dataclass(frozen=True)
class Point:
    """Where a fault is put, and what it is.

    Args:
        config: devices of each stage.
        kind: of :data:`SIGNALS`.
        phase: of a run.
        rank: whom it happens to.
        place: see ``tests.support.tinyfaults.Injection``.
        epoch: in which epoch.
        count: see there.
        pipeline: what is trained, without faults; its stages are those of ``config``.
    """

    config: str
    kind: str
    phase: str
    rank: int
    place: str
    epoch: int
    count: int
    pipeline: tuple[str, ...] = PIPELINE

    @property
    def id(self) -> str:
        which = [word for word in self.pipeline if word.startswith("parallel=")]
        own = [] if self.pipeline is PIPELINE else [which[-1].partition("=")[2]]
        words = [*own, self.config, self.kind, self.phase, f"rank {self.rank}", self.place]
        return " ".join([*words, str(self.count)])

    @property
    def replicas(self) -> list[int]:
        return [int(part) for part in self.config.split("-")]

    @property
    def stage(self) -> int:
        return [s for s, count in enumerate(self.replicas) for _ in range(count)][self.rank]

    @property
    def under_way(self) -> range:
        """Minibatches, numbered through the run, that ranks may be at when it happens."""
        if "parallel=pipeline" not in self.pipeline:
            return self._one_at_a_time
        replicas = self.replicas
        if self.place == "validation":
            return range(self.count * replicas[0] + 2 * replicas[0])
        round_of = replicas[self.stage] if self.place == "update" else replicas[0]
        first = self.epoch * STEPS + self.count * round_of
        apart = sum(replicas) + max(replicas)
        end = min(first + apart, (self.epoch + 1) * STEPS)
        return range(max(first - apart, self.epoch * STEPS), end)

    @property
    def _one_at_a_time(self) -> range:
        """In a synchronous pipeline, where those who have updated may begin with the next one."""
        assert self.place != "validation"
        steps = STEPS // self.replicas[0]
        first = self.epoch * steps + self.count
        return range(max(first - 1, self.epoch * steps), min(first + 2, (self.epoch + 1) * steps))

    @property
    def undisturbed(self) -> tuple[str, ...]:
        return (*self.pipeline, f"parallel.plan.config={self.config}")

    @property
    def settings(self) -> tuple[str, ...]:
        node = (
            f"_target_: tests.support.tinyfaults.Injection, "
            f"rank: {self.rank}, place: {self.place}, "
            f"signum: {int(SIGNALS[self.kind])}, epoch: {self.epoch}, count: {self.count}"
        )
        return (*self.undisturbed, f"callbacks={{fault: {{{node}}}}}")


def ended_s(directory: Path) -> float:
    """Seconds since the fault."""
    return time.time() - (directory / "injected").stat().st_mtime


def assert_told(failed: Finished, point: Point) -> None:
    """One message, which blames the right rank and stage for what was under way there."""
    assert failed.code > 0
    assert failed.err.count("error: ") == 1, failed.err
    assert failed.err.count("remedy:") == 1, failed.err
    told = failed.err[failed.err.index("error: ") :]
    culprit = f"rank {point.rank} (stage {point.stage})"
    if point.kind == "raises":
        assert f"{culprit} raised ValueError: somebody's own mistake" in told, told
        if point.place == "update":
            assert named(told), told
            assert named(told) <= set(point.under_way), told
        return
    assert re.match(f"error: {re.escape(culprit)} {BLAMED}", told), told
    assert "somebody's own mistake" not in told
    if point.phase != "start":
        assert_placed(told, point)


def assert_placed(told: str, point: Point) -> None:
    """A message names minibatches that were under way, or what else was."""
    numbers = named(told)
    assert numbers or re.search(MEETINGS.get(point.phase, "no other"), told), told
    assert numbers <= set(point.under_way), told


def named(told: str) -> set[int]:
    """The minibatches of a message."""
    return {int(number) for number in re.findall(r"minibatch(?:es)? (\d+)", told)}


def assert_same(run: Path, expected: Path) -> None:
    """The weights and statistics of an undisturbed run, and each epoch once."""
    ours, theirs = checkpoint(run)["state_dict"], checkpoint(expected)["state_dict"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert [row["epoch"] for row in rows(run)] == [str(epoch) for epoch in range(EPOCHS)]
    losses = [[row["val/loss"] for row in rows(path)] for path in (run, expected)]
    assert losses[0] == losses[1]


def fails_in_time(shell: Shell, point: Point) -> None:
    failed = shell(*point.settings, timeout_s=180)
    assert (shell.cwd / "injected").exists(), "the fault did not come about"
    assert ended_s(shell.cwd) < TIMEOUT_S + PATIENCE_S + LEAVING_S
    assert not orphans(shell.cwd)
    assert_told(failed, point)
