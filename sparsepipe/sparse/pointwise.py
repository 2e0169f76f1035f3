"""Layers that act on each row of features; they also take plain tensors.

Ordinary PyTorch modules, parameters and state names included, that look through a
:class:`SparseTensor` to its features.
"""

from __future__ import annotations

from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from sparsepipe.sparse.tensor import SparseTensor

Features = TypeVar("Features", SparseTensor, Tensor)


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation over all voxels of the batch.

    In training a batch of fewer than two rows has no variance: it is normalised with
    the running statistics, which it leaves as they are.
    """

    def forward(self, input: Features) -> Features:
        """Normalise each channel."""
        if isinstance(input, SparseTensor):
            return input.replace_feats(self._normalise(input.feats))
        return self._normalise(input)

    def _normalise(self, feats: Tensor) -> Tensor:
        if self.training and feats.dim() == 2 and feats.shape[0] < 2 and self.track_running_stats:
            # Copies: other batches move the statistics on before this one's backward.
            mean, var = self.running_mean, self.running_var
            assert mean is not None
            assert var is not None
            return F.batch_norm(
                feats, mean.clone(), var.clone(), self.weight, self.bias, eps=self.eps
            )
        return super().forward(feats)


class ReLU(nn.ReLU):
    """Rectifier."""

    def forward(self, input: Features) -> Features:
        """Replace negative features by zero."""
        if isinstance(input, SparseTensor):
            return input.replace_feats(super().forward(input.feats))
        return super().forward(input)


class Linear(nn.Linear):
    """The same linear map at every voxel."""

    def forward(self, input: Features) -> Features:
        """Map the channels."""
        if isinstance(input, SparseTensor):
            return input.replace_feats(super().forward(input.feats))
        return super().forward(input)


class Dropout(nn.Dropout):
    """Zero single features at random in training."""

    def forward(self, input: Features) -> Features:
        """Drop features."""
        if isinstance(input, SparseTensor):
            return input.replace_feats(super().forward(input.feats))
        return super().forward(input)
