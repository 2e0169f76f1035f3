"""Runs of the paper's Fig. 9: on which GPUs, how they came about, and which may be compared."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePath
from statistics import fmean
from typing import Any

from sparsepipe.paper.printed import printed
from sparsepipe.report.chapter import Row
from sparsepipe.report.commands import Commands, Request
from sparsepipe.report.overrides import Composed, is_made_by, overrides_of

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
class Setting:
    """How figures were obtained.

    Attributes:
        kind: ``simulated`` or ``emulated``.
        link_bytes_per_s: between hosts; None if unknown.
        network: of what is emulated, ``namespaces`` or ``loopback``.
    """

    kind: str
    link_bytes_per_s: float | None
    network: str | None = None

    @property
    def title(self) -> str:
        """The setting as text."""
        known = self.link_bytes_per_s
        link = "link unknown" if known is None else f"{known / 1e6:g} MB/s between hosts"
        if self.kind == "simulated":
            return f"simulated, {link}"
        if self.network == "loopback":
            link = "links not limited"
        return f"emulated ({self.network}), {link}"

    @property
    def order(self) -> tuple[bool, float, str]:
        link = self.link_bytes_per_s
        return self.kind != "simulated", math.inf if link is None else link, self.network or ""


EXPECTED = (
    *(Setting(kind="simulated", link_bytes_per_s=link) for link in (50e6, 100e6, 125e6)),
    Setting(kind="emulated", link_bytes_per_s=125e6, network="namespaces"),
)
"""Settings of the whole sweep."""


def minibatch_s(result: Mapping[str, Any]) -> float:
    """Seconds between two minibatches at the steady pace of a run."""
    return 1 / float(result["minibatches_per_s"])


def dp_minibatch_s(own: Sequence[float], computed: Iterable[float | None]) -> float | None:
    """Seconds of a minibatch by data parallelism, over which speedups are taken.

    Returns:
        None where neither is known.
    """
    known = list(own) or list(dict.fromkeys(value for value in computed if value))
    return fmean(known) if known else None


def setting_of(result: Mapping[str, Any]) -> Setting:
    """The setting of a simulation or an emulation."""
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


def devices_of(result: Mapping[str, Any]) -> int:
    """The number of devices, from text such as ``1 x TITAN V, 4 x RTX 2080 Ti``."""
    counts = re.findall(r"(?:^|, )(\d+) x ", str(result.get("hardware_devices") or ""))
    return sum(map(int, counts))


def strategy_of(result: Mapping[str, Any]) -> str | None:
    """The run's option of ``parallel``; None where the figure lacks it."""
    where = "task.parallel" if result.get("kind") == "simulated" else "parallel"
    if str(result.get(f"{where}.strategy._target_")).endswith(".DataParallelStrategy"):
        return "dp"
    search = result.get(f"{where}.search.search")
    if search in STRATEGIES:
        return str(search)
    file = str(result.get(f"{where}.plan.file"))
    return "paper_mp" if re.search(r"plans/paper/mp_\d+gpu\.json$", file) else None


_HOSTS = "hardware.value.hosts"


def is_on_its_gpus(row: Row, composed: Composed | None) -> bool:
    """Whether a run's hardware is the inventory of the paper for as many GPUs."""
    gpus = devices_of(row)
    if _kinds(str(row.get("hardware_devices") or "").split(", ")) != _papers().get(gpus):
        return False
    own = row.get(_HOSTS)
    if composed is None or not isinstance(own, list):
        return True
    theirs = composed(("experiment=fig9", f"hardware=paper_{gpus}gpu"), (_HOSTS,)).get(_HOSTS)
    return theirs is None or list(map(_host, own)) == list(map(_host, theirs))


@cache
def _papers() -> Mapping[int, Counter[str]]:
    """Counts of GPU kinds in the paper's inventories, by the number of GPUs."""
    return {
        int(row["num_gpus"]): _kinds(row["gpu_config"].split(" + ")) for row in printed("table3")
    }


def _kinds(parts: Iterable[str]) -> Counter[str]:
    """Counts from parts such as ``4 x RTX 2080 Ti`` or, as printed, ``4 RTX``."""
    found: Counter[str] = Counter()
    for part in parts:
        match = re.fullmatch(r"(\d+) (?:x )?(.+)", part)
        if match is not None:
            name = match[2].casefold().replace(" ", "")
            found["rtx" if name == "rtx2080ti" else name] += int(match[1])
    return found


def _host(host: Mapping[str, Any]) -> tuple[Any, ...]:
    """The properties of a host that affect simulations and emulations."""
    devices = [
        (
            device.get("name"),
            device.get("count"),
            device.get("memory_bytes"),
            {name: PurePath(file).name for name, file in (device.get("profile") or {}).items()},
        )
        for device in host.get("devices", ())
    ]
    return devices, (host.get("link") or {}).get("bytes_per_s")


_SIMULATED = "task.parallel."
_OF_CELLS = (
    *("parallel.plan.file", "parallel.search.search", "parallel.strategy._target_"),
    *("parallel.devices", "parallel.num_nodes"),
)
_NO_MATTER = (
    *("parallel.grace_s", "parallel.max_restarts", "parallel.search.measure"),
    *("parallel.strategy.process_group_backend", "parallel.strategy.timeout_s"),
)
_OF_SIMULATIONS = (
    *("task.all_reduce", "task.inbox", "task.microbatches", "task.outbox", "task.overlap"),
    "task.schedule",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs whose figures may be compared."""

    setting: Setting
    others: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return "; ".join((self.setting.title, *self.others))

    @property
    def simulated(self) -> Group | None:
        """The group simulated over the same link; None for simulations and unlimited links."""
        if self.setting.network != "namespaces":
            return None
        link = self.setting.link_bytes_per_s
        return replace(self, setting=Setting(kind="simulated", link_bytes_per_s=link))

    @property
    def task(self) -> tuple[str, ...]:
        """Overrides that make such figures."""
        return (*_task(self.setting), *self.others)


def groups_of(rows: Sequence[Row], commands: Commands) -> dict[Group, list[Row]]:
    """Runs by what they have in common; those of the whole sweep come also without any run.

    So do those of overrides that a sweep has requested and that no run has.

    A run belongs to each group whose command for its bar gives its configuration.
    """
    bars = [row for row in rows if _is_bar(row) and is_on_its_gpus(row, commands.composed)]
    own = [_group(row, commands) for row in bars]
    requested = ((), *filter(None, map(_others, commands.requests)))
    expected = (Group(setting=each, others=others) for others in requested for each in EXPECTED)
    found = dict.fromkeys((*expected, *own))
    pairs = list(zip(bars, own, strict=True))
    return {
        group: [row for row, mine in pairs if _belongs(row, mine, group, commands)]
        for group in sorted(found, key=lambda each: (each.setting.order, each.others))
    }


def elsewhere(rows: Sequence[Row], commands: Commands) -> list[Row]:
    """Runs left out because their hardware is not the paper's."""
    return [row for row in rows if _is_bar(row) and not is_on_its_gpus(row, commands.composed)]


def _is_bar(row: Row) -> bool:
    is_of_kind = row.get("kind") in ("simulated", "emulated")
    return bool(is_of_kind and row.get("minibatches_per_s") and strategy_of(row))


def matters(key: str) -> bool:
    """Whether a key of the configuration affects the figures."""
    if key in _OF_SIMULATIONS:
        return True
    dropped = (*_OF_CELLS, *_NO_MATTER)
    below = any(key == name or key.startswith(f"{name}.") for name in dropped)
    return key.startswith("parallel.") and not below


def _others(request: Request) -> tuple[str, ...]:
    """Requested overrides that affect the figures."""
    return tuple(word for word in request.overrides or () if matters(word.partition("=")[0]))


def _group(row: Row, commands: Commands) -> Group:
    setting = setting_of(row)
    if commands.composed is None:
        return Group(setting=setting)
    others = overrides_of(_configured(row), _command(row, setting), commands.composed, matters)
    return Group(setting=setting, others=others)


def _belongs(row: Row, own: Group, group: Group, commands: Commands) -> bool:
    if own.setting != group.setting or own == group or commands.composed is None:
        return own == group
    command = _command(row, own.setting)
    return is_made_by(_configured(row), command, group.others, commands.composed, matters)


def _command(row: Row, setting: Setting) -> tuple[str, ...]:
    """The command of a run's bar, without GPUs, which affect no setting."""
    return ("experiment=fig9", *_task(setting), f"parallel={strategy_of(row)}")


def _configured(row: Row) -> Mapping[str, object]:
    """The row with ``parallel`` as configured, which simulations keep in their task."""
    if row["kind"] != "simulated":
        return {key: value for key, value in row.items() if not key.startswith("task.")}
    kept = {key: value for key, value in row.items() if not key.startswith("parallel.")}
    return {key.removeprefix("task.") if key.startswith(_SIMULATED) else key: value
            for key, value in kept.items()}  # fmt: skip


def _task(setting: Setting) -> tuple[str, ...]:
    link = setting.link_bytes_per_s
    if setting in EXPECTED:
        own = "emulated" if setting.kind == "emulated" else f"simulated_{(link or 0) / 1e6:g}"
        return (f"task=paper/fig9_{own}",)
    own = "emulated" if setting.kind == "emulated" else "simulated_125"
    network = (f"task.network={setting.network}",) if setting.network else ()
    speed = (f"task.link_bytes_per_s={link:g}",) if link is not None else ()
    return (f"task=paper/fig9_{own}", *network, *speed)
