"""Costs of stages and cuts: Eq. 4 and 5 of the paper, and those of published optimizers.

Zhai et al., SparsePipe, Eq. 4, for layers i to j on the m devices S(m)::

    Q = (1/m) (max over a in S(m) of the sum of t_a + 2 (m-1) (sum of p) / BW)

with the compute time t_a of a layer on device a, its parameter bytes p and the bandwidth BW, and
Eq. 5 counts a / BW for the activation a that crosses a cut. The published optimizers divide
the bytes of an all-reduce by its m devices, let a gradient cross each cut as well, and differ in
how often they count a parameter and in whether receiving replicas share a transfer. None of them
counts latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sparsepipe.errors import ConfigError
from sparsepipe.partition.costs.layers import Spans
from sparsepipe.partition.devices import Choice, DevicePool
from sparsepipe.utils.extensions import by_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Formulas for the seconds that stages and cuts take for a minibatch.

    A subclass may replace :meth:`sync_s_per_byte` and :meth:`cut_s_per_byte`.

    Args:
        name: name in tables and plan files.
        sync: f, where a parameter byte counts f (m - 1) times in the all-reduce of m replicas.
        sync_is_shared: whether these bytes are divided by m.
        cut: how often an activation byte counts in a transfer: 2 if its gradient is sent back.
        cut_is_shared: whether the receiving replicas share the transfer.
    """

    name: str
    sync: float
    sync_is_shared: bool
    cut: float
    cut_is_shared: bool

    def sync_s_per_byte(self, replicas: int, *, bytes_per_s: float) -> float:
        """Seconds of one all-reduce, which serves ``replicas`` minibatches, per parameter byte."""
        times = self.sync * (replicas - 1)
        return times / (replicas * bytes_per_s if self.sync_is_shared else bytes_per_s)

    def sync_s(self, parameter_bytes: float, *, replicas: int, bytes_per_s: float) -> float:
        """Seconds of all-reduce between ``replicas`` that a stage takes for each minibatch."""
        return parameter_bytes * self.sync_s_per_byte(replicas, bytes_per_s=bytes_per_s) / replicas

    def stage_s(
        self, compute_s: float, parameter_bytes: float, *, replicas: int, bytes_per_s: float
    ) -> float:
        """Q, the seconds between two minibatches if one takes its slowest device ``compute_s``."""
        return compute_s / replicas + self.sync_s(
            parameter_bytes, replicas=replicas, bytes_per_s=bytes_per_s
        )

    def cut_s_per_byte(self, receivers: int, *, bytes_per_s: float) -> float:
        """Seconds per activation byte for a transfer to a stage with ``receivers`` devices."""
        return self.cut / (bytes_per_s * receivers if self.cut_is_shared else bytes_per_s)


PRESETS: Mapping[str, CostModel] = MappingProxyType(
    {
        name: CostModel(
            name=name, sync=sync, sync_is_shared=shared, cut=cut, cut_is_shared=cut_shared
        )
        for name, sync, shared, cut, cut_shared in (
            ("eq4", 2, False, 1, False),
            ("pipedream", 4, True, 2, True),
            ("sparsepipe_mp", 2, True, 2, True),
            ("sparsepipe_hete", 2, True, 2, False),
        )
    }
)
"""``eq4``: the paper's equations to the letter. ``pipedream``: PipeDream's published optimizer.
``sparsepipe_mp`` and ``sparsepipe_hete``: the two in the repository of the paper's authors."""


def cost_model(name: str | CostModel) -> CostModel:
    """Returns the cost model of that name.

    Args:
        name: a preset's name; or ``2_whole``, ``2_shared``, ``4_whole`` or ``4_shared``: how often
            a parameter byte counts, and whether receivers share a transfer; or the dotted path of a
            subclass of :class:`CostModel` or of a function without arguments; or a cost model,
            which is returned.
    """
    if isinstance(name, CostModel):
        return name
    sync, _, cut = name.partition("_")
    if sync in ("2", "4") and cut in ("whole", "shared"):
        is_shared = cut == "shared"
        return CostModel(
            name=name, sync=float(sync), sync_is_shared=True, cut=2, cut_is_shared=is_shared
        )
    found = by_name(name, PRESETS, kind="cost model")
    model = found if isinstance(found, CostModel) else found()
    if not isinstance(model, CostModel):
        raise ConfigError(
            f"{name} returns {model!r} instead of a cost model",
            remedy="name a subclass of sparsepipe.partition.costs.model.CostModel",
        )
    return model


def plan_times(
    plan: Sequence[Choice],
    spans: Spans,
    pool: DevicePool,
    model: CostModel,
    *,
    by_hosts: bool = False,
) -> tuple[list[float], list[float]]:
    """Seconds of each stage for a minibatch, and of the transfer after each stage but the last.

    With ``by_hosts``, receiving devices on one host share its link, as in PipeDream's optimizer for
    several levels; otherwise each counts as if it had a link of its own.
    """
    stages, cuts, sums_KI = [], [], spans.compute_s_KI
    for number, stage in enumerate(plan):
        first, end, replicas = stage.first, stage.end, sum(stage.counts)
        kinds = [kind for kind, count in enumerate(stage.counts) if count]
        stages.append(
            model.stage_s(
                float(max(sums_KI[kind, end] - sums_KI[kind, first] for kind in kinds)),
                spans.parameter_bytes(first, end),
                replicas=replicas,
                bytes_per_s=pool.sync_bytes_per_s(stage.counts),
            )
        )
        if number:
            before, receivers = plan[number - 1].counts, replicas
            if by_hosts:
                speed, receivers = pool.between_hosts(before, stage.counts)
            else:
                speed = pool.cut_bytes_per_s(pool.host_of(before), pool.host_of(stage.counts))
            each = model.cut_s_per_byte(receivers, bytes_per_s=speed)
            cuts.append(each * float(spans.cut_bytes_I[first]))
    return stages, cuts


def bottleneck_s(plan: Sequence[Choice], spans: Spans, pool: DevicePool, model: CostModel) -> float:
    """Seconds between two minibatches of a plan: those of its slowest stage or transfer."""
    stages, cuts = plan_times(plan, spans, pool, model)
    return max(stages + cuts)


EQUAL = 1e-9
"""Relative difference up to which times count as equal."""

EXACT = 1e-11
"""Relative difference by which a found bottleneck may exceed the smallest one."""
