"""Thin Lightning strategies over ``runtime``, registered by name."""

from sparsepipe.strategies.data_parallel import DataParallelStrategy, SlowedDeviceStrategy
from sparsepipe.strategies.distributed import RankEnvironment
from sparsepipe.strategies.pipeline import (
    PipelineStrategy,
    StagedStrategy,
    SynchronousPipelineStrategy,
)

__all__ = [
    "DataParallelStrategy",
    "PipelineStrategy",
    "RankEnvironment",
    "SlowedDeviceStrategy",
    "StagedStrategy",
    "SynchronousPipelineStrategy",
]
