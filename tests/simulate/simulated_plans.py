"""Plans for simulations."""

from __future__ import annotations

from sparsepipe.schedule import Plan


def plan_of(config: str) -> Plan:
    """Stages of one layer with as many replicas as ``config`` says, such as "2-1"."""
    stages = config.count("-") + 1
    return Plan.of(config=config, cuts=range(1, stages), num_layers=stages)
