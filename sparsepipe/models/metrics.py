"""Metrics of samples and of voxels, by operations that also count samples cut over devices.

Labels are those of samples [B], or of voxels [B, *spatial]; logits are [B, K] or [B, K, *spatial].
A sample that is cut into shards is no plain tensor: what is counted here are sums of comparisons,
which such a sample has, and of which every device gets the whole. Metrics of libraries do more with
their arguments than that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

IGNORED = -100
"""The label of voxels that do not count; PyTorch's, for cross-entropy."""


class Accuracy(Metric):
    """Share of labels that have the largest logit, over all labels."""

    full_state_update = False
    hits: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("hits", "total"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, label: Tensor) -> None:
        """Count a batch."""
        self.hits += (logits.argmax(1) == label).sum()
        self.total += (label != IGNORED).sum()

    def compute(self) -> Tensor:
        """The share in [0, 1]; NaN of no labels."""
        return self.hits.float() / self.total


class Confusion(MulticlassConfusionMatrix):
    """Counts [K, K] of samples or voxels, true class by row.

    Attributes:
        of_voxels: 1 if labels of voxels were counted, else 0. A state like the counts, since a
            process may have those that another one counted.
    """

    of_voxels: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.add_state("of_voxels", torch.tensor(0), dist_reduce_fx="max")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count a batch of logits and labels."""
        if target.dim() > 1:
            self.of_voxels = torch.ones_like(self.of_voxels)
            self.confmat += confusion_of(preds, target)
        else:
            super().update(preds, target)


class MeanIoU(Confusion):
    """The mean of :func:`ious_of` over classes."""

    def compute(self) -> Tensor:
        """In [0, 1]."""
        return ious_of(super().compute()).nanmean()


def confusion_of(logits: Tensor, label: Tensor) -> Tensor:
    """Counts int64 [K, K] of labels, true class by row; those that are ignored do not count."""
    num_classes = logits.shape[1]
    each = torch.arange(num_classes, device=logits.device)
    each = each.view(1, -1, *[1] * (logits.dim() - 2))
    is_predicted = logits.argmax(1, keepdim=True) == each
    true, others = label.unsqueeze(1), [0, *range(2, logits.dim())]
    return torch.stack([(is_predicted & (true == k)).sum(others) for k in range(num_classes)])


def ious_of(counts_KK: Tensor) -> Tensor:
    """Intersection over union [K]: what is of a class and predicted so, of what is either.

    NaN for classes that neither occur nor are predicted.
    """
    hits_K = counts_KK.diagonal()
    return hits_K / (counts_KK.sum(0) + counts_KK.sum(1) - hits_K)
