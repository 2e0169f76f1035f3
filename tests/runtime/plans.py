"""Plans for tests in which only the placement matters: one layer a stage."""

from __future__ import annotations

from sparsepipe.schedule import Plan


def plan_of(config: str) -> Plan:
    """The plan with as many replicas in each stage as ``config`` says, such as "2-1"."""
    stages = len(config.split("-"))
    return Plan.of(config=config, cuts=range(1, stages), num_layers=stages)
