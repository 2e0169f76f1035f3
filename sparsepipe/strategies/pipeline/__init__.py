"""The asynchronous pipeline as a Lightning Strategy."""

from sparsepipe.strategies.pipeline.loaders import Elsewhere
from sparsepipe.strategies.pipeline.strategy import PipelineStrategy

__all__ = ["Elsewhere", "PipelineStrategy"]
