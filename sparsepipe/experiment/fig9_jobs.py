"""The jobs of a sweep of ``experiment=fig9``: what each was, where it stands, what lacks. Pure.

A job's place is how it came about (simulated or emulated, over which links), on how many GPUs and
by which strategy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsepipe.results.fig9_settings import (
    EXPECTED,
    GPUS,
    STRATEGIES,
    Setting,
    devices_of,
    minibatch_s,
    setting_of,
)
from sparsepipe.results.sweep_table import plan_text

__all__ = ["EXPECTED", "GPUS", "STRATEGIES", "Cell", "Job", "Setting", "cell_of", "notes"]

_LOOPBACK = (
    ", but on loopback: a run does not know who asks, and as root, who may make namespaces, the "
    "same command leaves out what is finished; give it force=true"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of the sweep.

    Args:
        choices: its option of ``task``, ``hardware`` and ``parallel``.
        run: its directory; None where it failed.
        result: what ``result.json`` holds; empty where it failed.
    """

    choices: Mapping[str, str]
    run: str | None
    result: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As the command line has it."""
        groups = ("parallel", "hardware", "task")
        return " ".join(f"{group}={self.choices.get(group)}" for group in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What came of a finished job.

    Attributes:
        setting: how.
        gpus: how many.
        strategy: of :data:`STRATEGIES`, or another option of ``parallel``.
        plan: in words.
        minibatch_s: seconds between two minibatches at the steady pace.
        time_scale: of what is emulated; such seconds are the cluster's, whatever the scale.
        steady_steps: of what is emulated, steps over which that pace was taken.
        dp_s: the same of data parallelism, where the job tells.
        dp_without_overlap_s: of data parallelism that sums gradients after the backward.
        run: its directory.
    """

    setting: Setting
    gpus: int
    strategy: str
    plan: str
    minibatch_s: float
    time_scale: float | None
    steady_steps: int | None
    dp_s: float | None
    dp_without_overlap_s: float | None
    run: str


def cell_of(job: Job) -> Cell | None:
    """What came of a job; None where that is no pace of a simulation or an emulation."""
    result = job.result
    pace, devices = result.get("minibatches_per_s"), devices_of(result)
    if result.get("kind") not in ("simulated", "emulated") or not pace or not devices:
        return None
    assert job.run is not None, "what failed has no result"
    config = result.get("plan_config") or str(devices)
    return Cell(
        setting=setting_of(result),
        gpus=devices,
        strategy=str(job.choices.get("parallel")),
        plan=plan_text(str(config), result.get("plan_cuts") or ()),
        minibatch_s=minibatch_s(result),
        time_scale=result.get("time_scale"),
        steady_steps=result.get("steady_steps"),
        dp_s=result.get("dp_minibatch_s"),
        dp_without_overlap_s=result.get("dp_without_overlap_minibatch_s"),
        run=job.run,
    )


def notes(jobs: Sequence[Job], cells: Sequence[Cell]) -> list[str]:
    """What the figure lacks, and why: failed jobs, those that are no bar, and missing ones."""
    return [*_of_jobs(jobs, cells), *_missing(cells)]


def _of_jobs(jobs: Sequence[Job], cells: Sequence[Cell]) -> Iterator[str]:
    runs = {cell.run for cell in cells}
    for job in jobs:
        if job.run is None:
            yield f"failed: {job.name}"
        elif job.run not in runs:
            yield f"no bar of the figure: {job.name} ({job.run})"
    own = dict.fromkeys((cell.setting, cell.gpus, cell.strategy, cell.run) for cell in cells)
    places = [(setting, gpus, strategy) for setting, gpus, strategy, _ in own]
    for setting, gpus, strategy in dict.fromkeys(places):
        if (count := places.count((setting, gpus, strategy))) > 1:
            yield (
                f"{count} runs of {_name(strategy)} on {gpus} GPUs, {setting.title}: the last one "
                "counts"
            )
    for strategy in dict.fromkeys(c.strategy for c in cells if c.strategy not in STRATEGIES):
        yield f"in the table alone: parallel={strategy}"


def _missing(cells: Sequence[Cell]) -> Iterator[str]:
    there = dict.fromkeys(cell.setting for cell in cells)
    for setting in EXPECTED:
        if setting not in there:
            unlimited = replace(setting, network="loopback") in there
            yield f"nothing in this sweep is {setting.title}{_LOOPBACK if unlimited else ''}"
    for setting in sorted(there, key=lambda setting: setting.order):
        lacking = []
        for strategy, name in STRATEGIES.items():
            found = {c.gpus for c in cells if (c.setting, c.strategy) == (setting, strategy)}
            if missing := [str(gpus) for gpus in GPUS if gpus not in found]:
                lacking.append(f"{name} on {', '.join(missing)} GPUs")
        if lacking:
            yield f"no run that is {setting.title}: {'; '.join(lacking)}"


def _name(strategy: str) -> str:
    return STRATEGIES.get(strategy, strategy)
