"""Pipelines over the layers of a network as Lightning strategies."""

from sparsepipe.strategies.pipeline.asynchronous import PipelineStrategy
from sparsepipe.strategies.pipeline.dataloaders import RemoteBatch
from sparsepipe.strategies.pipeline.staged import StagedStrategy
from sparsepipe.strategies.pipeline.synchronous import SynchronousPipelineStrategy

__all__ = ["PipelineStrategy", "RemoteBatch", "StagedStrategy", "SynchronousPipelineStrategy"]
