"""The jobs of a sweep of ``experiment=fig9``: what each was, where it stands, what lacks. Pure.

A job's place is how it came about (simulated or emulated, over which links), on how many GPUs and
by which strategy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparsepipe.results.sweep_table import plan_text

STRATEGIES: Mapping[str, str] = {
    "dp": "DP",
    "mp": "MP",
    "paper_mp": "MP, the paper's split",
    "hete_mp": "HETE-MP",
    "exact": "exact",
}
"""Names by ``parallel``, in the order of the figure."""
GPUS = (5, 6, 7, 8)


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
class Setting:
    """How figures came about.

    Attributes:
        kind: ``simulated`` or ``emulated``.
        link_bytes_per_s: between hosts; None where nobody knows.
        network: of what is emulated, ``namespaces`` or ``loopback``.
    """

    kind: str
    link_bytes_per_s: float | None
    network: str | None = None

    @property
    def title(self) -> str:
        """In words."""
        known = self.link_bytes_per_s
        link = "link unknown" if known is None else f"{known / 1e6:g} MB/s between hosts"
        if self.kind == "simulated":
            return f"simulated, {link}"
        if self.network == "loopback":
            link = "links not limited"
        return f"emulated ({self.network}), {link}"

    @property
    def order(self) -> tuple[bool, float, str]:
        """Simulated ones first, then by the links."""
        link = self.link_bytes_per_s
        return self.kind != "simulated", math.inf if link is None else link, self.network or ""


EXPECTED = (
    *(Setting(kind="simulated", link_bytes_per_s=link) for link in (50e6, 100e6, 125e6)),
    Setting(kind="emulated", link_bytes_per_s=125e6, network="namespaces"),
)
"""Of the whole sweep."""
_LOOPBACK = (
    ", but on loopback: a run does not know who asks, and as root, who may make namespaces, the "
    "same command leaves out what is finished; give it force=true"
)


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
    pace, devices = result.get("minibatches_per_s"), _devices(result)
    if result.get("kind") not in ("simulated", "emulated") or not pace or not devices:
        return None
    assert job.run is not None, "what failed has no result"
    config = result.get("plan_config") or str(devices)
    return Cell(
        setting=_setting(result),
        gpus=devices,
        strategy=str(job.choices.get("parallel")),
        plan=plan_text(str(config), result.get("plan_cuts") or ()),
        minibatch_s=1 / float(pace),
        time_scale=result.get("time_scale"),
        steady_steps=result.get("steady_steps"),
        dp_s=result.get("dp_minibatch_s"),
        dp_without_overlap_s=result.get("dp_without_overlap_minibatch_s"),
        run=job.run,
    )


def _setting(result: Mapping[str, Any]) -> Setting:
    inventory = result.get("hardware.value.link.bytes_per_s")
    if result["kind"] == "simulated":
        link = result.get("task.link_bytes_per_s") or inventory
        return Setting(kind="simulated", link_bytes_per_s=None if link is None else float(link))
    link = result.get("link_bytes_per_s") or inventory
    return Setting(
        kind="emulated",
        link_bytes_per_s=None if link is None else float(link),
        network=str(result.get("network")),
    )


def _devices(result: Mapping[str, Any]) -> int:
    """From words such as ``1 x TITAN V, 4 x RTX 2080 Ti``."""
    counts = re.findall(r"(?:^|, )(\d+) x ", str(result.get("hardware_devices") or ""))
    return sum(map(int, counts))


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
