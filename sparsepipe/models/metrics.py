"""Metrics of samples and of voxels, by operations that also count samples cut over devices.

Labels are those of samples [B], or of voxels [B, *spatial]; logits are [B, K] or [B, K, *spatial].
A sample that is cut into shards has sums of comparisons, of which every device gets the whole, but
not all operations that metrics of libraries need.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
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
        of_voxels: 1 if labels of voxels were counted by any process, else 0.
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
        return ious_of(super().compute()).nanmean()


class Predictions(Metric):
    """The class that is predicted of each sample, by the sample's number in its split."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in _OF_SAMPLE:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, batch: Mapping[str, Tensor], logits: Tensor) -> None:
        for name, value in predictions_of(batch, logits).items():
            getattr(self, name).append(value)

    def compute(self) -> dict[str, Tensor]:
        """``index``, ``label``, ``prediction`` and ``probability`` [S], in the order of the index;
        samples that several ranks have appear once.
        """
        kept = {name: getattr(self, name) for name in _OF_SAMPLE}
        found = {
            name: value if isinstance(value, Tensor) else torch.cat(value)
            for name, value in kept.items()
        }
        # The first place of each number.
        _, places_S = np.unique(found["index"].cpu().numpy(), return_index=True)
        chosen_S = torch.from_numpy(places_S)
        return {name: value.cpu()[chosen_S] for name, value in found.items()}


_OF_SAMPLE = ("index", "label", "prediction", "probability")


def predictions_of(batch: Mapping[str, Tensor], logits_BK: Tensor) -> dict[str, Tensor]:
    """The ``prediction`` and its ``probability`` [B], beside ``index`` and ``label`` of a batch."""
    probability_B, prediction_B = logits_BK.detach().softmax(dim=1).max(dim=1)
    return {
        "index": batch["index"],
        "label": batch["label"],
        "prediction": prediction_B,
        "probability": probability_B,
    }


def confusion_of(logits: Tensor, label: Tensor) -> Tensor:
    """Counts int64 [K, K] of labels that are not ignored, true class by row."""
    num_classes = logits.shape[1]
    each = torch.arange(num_classes, device=logits.device)
    each = each.view(1, -1, *[1] * (logits.dim() - 2))
    is_predicted = logits.argmax(1, keepdim=True) == each
    true, others = label.unsqueeze(1), [0, *range(2, logits.dim())]
    return torch.stack([(is_predicted & (true == k)).sum(others) for k in range(num_classes)])


def ious_of(counts_KK: Tensor) -> Tensor:
    """Intersection over union [K]; NaN for classes that neither occur nor are predicted."""
    hits_K = counts_KK.diagonal()
    return hits_K / (counts_KK.sum(0) + counts_KK.sum(1) - hits_K)
