"""Thin Lightning strategies over ``runtime``, registered by name."""

from sparsepipe.strategies.data_parallel import DataParallelStrategy, SlowedDeviceStrategy
from sparsepipe.strategies.distributed import RankEnvironment
from sparsepipe.strategies.domain import DomainStrategy
from sparsepipe.strategies.pipeline import (
    PipelineStrategy,
    StagedStrategy,
    SynchronousPipelineStrategy,
)
from sparsepipe.strategies.spatial import SpatialStrategy, check_grid

__all__ = [
    "DataParallelStrategy",
    "DomainStrategy",
    "PipelineStrategy",
    "RankEnvironment",
    "SlowedDeviceStrategy",
    "SpatialStrategy",
    "StagedStrategy",
    "SynchronousPipelineStrategy",
    "check_grid",
]
