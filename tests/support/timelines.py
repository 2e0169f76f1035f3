"""When the actions of a schedule run, if messages take no time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparsepipe.schedule import Schedule, Span
from sparsepipe.simulate.engine import Setting, simulate
from sparsepipe.simulate.network import ClusterNetwork
from sparsepipe.simulate.workload import Workload


def timeline(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    update: float = 0.0,
    stages: Sequence[float] | None = None,
) -> list[Span]:
    """The spans of all ranks; replicas meet at updates."""
    plan = schedule.plan
    scale = None if stages is None else stages[: plan.num_stages]
    made = Workload.uniform(
        plan, forward_s=forward, backward_s=backward, scale=scale, parameter_bytes=1.0
    )
    factors = [1.0] * plan.num_stages if scale is None else scale
    costs = tuple(
        replace(stage, update_s=update * factor)
        for stage, factor in zip(made.stages, factors, strict=True)
    )
    setting = Setting(network=ClusterNetwork.flat(plan.num_ranks))
    return simulate(schedule, replace(made, stages=costs), setting).spans
