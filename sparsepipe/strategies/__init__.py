"""Thin Lightning strategies over ``runtime``, registered by name."""

from sparsepipe.strategies.dp import DataParallelStrategy
from sparsepipe.strategies.environment import RankEnvironment
from sparsepipe.strategies.pipeline import (
    PipelineStrategy,
    StagedStrategy,
    SynchronousPipelineStrategy,
)
from sparsepipe.strategies.slowed import SlowedDeviceStrategy

__all__ = [
    "DataParallelStrategy",
    "PipelineStrategy",
    "RankEnvironment",
    "SlowedDeviceStrategy",
    "StagedStrategy",
    "SynchronousPipelineStrategy",
]
