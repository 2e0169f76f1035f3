"""What stages and cuts cost: Eq. 4 and 5 of the paper, and what the optimizers compute.

Zhai et al., SparsePipe, Eq. 4, for layers i to j on the m devices S(m)::

    Q = (1/m) (max over a in S(m) of the sum of t_a + 2 (m-1) (sum of p) / BW)

and Eq. 5 counts a / BW for the activation a that crosses a cut. The optimizers that the figures
come from, PipeDream's and those of the paper's authors, divide the bytes that each device sends
by the m devices that share an all-reduce, let a gradient cross each cut as well, and differ in
how often they count a parameter and in whether receiving replicas share a transfer. None of them
has a latency: that of a link in the inventory does not count here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparsepipe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds a minibatch of stages and of cuts.

    Args:
        name: by which it is chosen.
        sync: times that a parameter byte is counted in an all-reduce.
        sync_is_shared: whether the devices of a stage share these bytes.
        cut: times that an activation byte is counted in a transfer.
        cut_is_shared: whether the receiving replicas share the transfer.
    """

    name: str
    sync: float
    sync_is_shared: bool
    cut: float
    cut_is_shared: bool

    def sync_s_per_byte(self, replicas: int, *, bytes_per_s: float) -> float:
        """Seconds of all-reduce that a parameter byte adds to ``replicas`` times a stage.

        Args:
            replicas: m, devices of the stage.
            bytes_per_s: BW, between them.
        """
        times = self.sync * (replicas - 1)
        return times / (replicas * bytes_per_s if self.sync_is_shared else bytes_per_s)

    def sync_s(self, parameter_bytes: float, *, replicas: int, bytes_per_s: float) -> float:
        """The all-reduce's part in a stage's time.

        Args:
            parameter_bytes: of the stage.
            replicas: m, devices of the stage.
            bytes_per_s: BW, between them.
        """
        return parameter_bytes * self.sync_s_per_byte(replicas, bytes_per_s=bytes_per_s) / replicas

    def stage_s(
        self, compute_s: float, parameter_bytes: float, *, replicas: int, bytes_per_s: float
    ) -> float:
        """Q, the time between two minibatches of a stage.

        Args:
            compute_s: forward, backward and update on the slowest of its devices.
            parameter_bytes: of the stage.
            replicas: m, its devices.
            bytes_per_s: BW, between them.
        """
        return compute_s / replicas + self.sync_s(
            parameter_bytes, replicas=replicas, bytes_per_s=bytes_per_s
        )

    def cut_s_per_byte(self, receivers: int, *, bytes_per_s: float) -> float:
        """Seconds that an activation byte takes across a cut.

        Args:
            receivers: m', devices of the stage behind the cut.
            bytes_per_s: BW, across it.
        """
        return self.cut / (bytes_per_s * receivers if self.cut_is_shared else bytes_per_s)


def _preset(name: str, sync: float, shared: bool, cut: float, cut_shared: bool) -> CostModel:
    return CostModel(name=name, sync=sync, sync_is_shared=shared, cut=cut, cut_is_shared=cut_shared)


PRESETS: Mapping[str, CostModel] = MappingProxyType(
    {
        "eq4": _preset("eq4", 2, False, 1, False),
        "pipedream": _preset("pipedream", 4, True, 2, True),
        "sparsepipe_mp": _preset("sparsepipe_mp", 2, True, 2, True),
        "sparsepipe_hete": _preset("sparsepipe_hete", 2, True, 2, False),
    }
)
"""``eq4``: the paper's equations to the letter. ``pipedream``: PipeDream's published optimizer.
``sparsepipe_mp`` and ``sparsepipe_hete``: the two in the repository of the paper's authors."""


def cost_model(name: str | CostModel) -> CostModel:
    """A preset by its name; ``4_whole``, ``2_shared`` and the like name the two settings.

    Args:
        name: of a preset, or the times a parameter byte counts (``2`` or ``4``), ``_``, and
            ``whole`` or ``shared``; a model of one's own is handed back.

    Raises:
        ConfigError: there is none of that name.
    """
    if isinstance(name, CostModel):
        return name
    if name in PRESETS:
        return PRESETS[name]
    sync, _, cut = name.partition("_")
    if sync in ("2", "4") and cut in ("whole", "shared"):
        return _preset(name, float(sync), True, 2, cut == "shared")
    raise ConfigError(
        f"there is no cost model {name!r}",
        remedy=f"use {', '.join(PRESETS)}, or 2_whole, 2_shared, 4_whole, 4_shared",
    )
