"""Thin Lightning strategies over ``runtime``, registered by name."""

from sparsepipe.strategies.dp import DataParallelStrategy
from sparsepipe.strategies.environment import RankEnvironment

__all__ = ["DataParallelStrategy", "RankEnvironment"]
