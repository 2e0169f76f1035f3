"""How a run of the paper's Fig. 9 came about: by its ``result.json``. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

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


def minibatch_s(result: Mapping[str, Any]) -> float:
    """Seconds between two minibatches at the steady pace of a run."""
    return 1 / float(result["minibatches_per_s"])


def dp_minibatch_s(own: Sequence[float], told: Iterable[float | None]) -> float | None:
    """Seconds of a minibatch by data parallelism, over which speedups are taken.

    Args:
        own: of its own runs, whose mean counts.
        told: as other runs on the same devices and links tell it; counts where it has no run.

    Returns:
        None where neither is known.
    """
    known = list(own) or list(dict.fromkeys(value for value in told if value))
    return fmean(known) if known else None


def setting_of(result: Mapping[str, Any]) -> Setting:
    """How a simulation or an emulation came about."""
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
    """How many, from words such as ``1 x TITAN V, 4 x RTX 2080 Ti``."""
    counts = re.findall(r"(?:^|, )(\d+) x ", str(result.get("hardware_devices") or ""))
    return sum(map(int, counts))


def strategy_of(result: Mapping[str, Any]) -> str | None:
    """The option of ``parallel`` by which a run was made; None where it is none of the figure."""
    where = "task.parallel" if result.get("kind") == "simulated" else "parallel"
    if str(result.get(f"{where}.strategy._target_")).endswith(".DataParallelStrategy"):
        return "dp"
    search = result.get(f"{where}.search.search")
    if search in STRATEGIES:
        return str(search)
    file = str(result.get(f"{where}.plan.file"))
    return "paper_mp" if re.search(r"plans/paper/mp_\d+gpu\.json$", file) else None
