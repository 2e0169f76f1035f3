"""Metrics of samples, voxels and points; those of voxels also work on samples cut into shards.

Labels are int64 [B] of samples or [B, *spatial] of voxels, with logits [B, K] or [B, K, *spatial],
or counts: floating [N, K], the points of each class in each voxel, whose logits are [N, K].
Shards support sums of comparisons, which give every rank the total, but not all operations that
torchmetrics needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

IGNORED = -100
"""Label of voxels and points that do not count, as in PyTorch's cross-entropy."""
COUNTED = "shapes", "voxels", "points"
"""What :class:`Confusion` may count, by the value of its ``counted``."""
UNPREDICTED = -2
"""Predicted class where logits are not finite; no label, not even one that does not count."""


def predicted(logits: Tensor) -> Tensor:
    """Returns the class with the largest logit, int64 [B] or [B, *spatial]; :data:`UNPREDICTED`
    where a logit is NaN or the largest is infinite.
    """
    return torch.where(logits.amax(1).isfinite(), logits.argmax(1), UNPREDICTED)


class Accuracy(Metric):
    """Share of labels whose class has the largest logit."""

    full_state_update = False
    hits: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("hits", "total"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, label: Tensor) -> None:
        if label.dtype.is_floating_point:
            counts = confusion_of(logits, label)
            self.hits, self.total = self.hits + counts.trace(), self.total + counts.sum()
            return
        self.hits += (predicted(logits) == label).sum()
        self.total += (label != IGNORED).sum()

    def compute(self) -> Tensor:
        """Returns the share in [0, 1]; NaN without labels."""
        return self.hits.float() / self.total


class Confusion(Metric):
    """Counts of samples, voxels or points, true class by row, predicted by column; [K, K], or with
    a further column, [K, K + 1], if some logits were not finite.

    Attributes:
        counted: what was counted by any process, as an index into :data:`COUNTED`.
    """

    full_state_update = False
    confmat: Tensor
    counted: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        zeros = torch.zeros(num_classes, num_classes + 1, dtype=torch.int64)
        self.add_state("confmat", zeros, dist_reduce_fx="sum")
        self.add_state("counted", torch.tensor(0), dist_reduce_fx="max")

    def update(self, logits: Tensor, label: Tensor) -> None:
        if label.dim() > 1:
            kind = 2 if label.dtype.is_floating_point else 1
            self.counted = torch.full_like(self.counted, kind)
        self.confmat += confusion_of(logits, label)

    def compute(self) -> Tensor:
        return known_columns(self.confmat)


class MeanIoU(Confusion):
    """Mean of :func:`ious_of` over the classes that occur or are predicted."""

    def compute(self) -> Tensor:
        return ious_of(super().compute()).nanmean()


class ClassAccuracy(Confusion):
    """Mean of the accuracies of the classes that occur."""

    def compute(self) -> Tensor:
        counts = super().compute()
        return (counts.diagonal() / counts.sum(1)).nanmean()


class PerSample(Metric):
    """Values of single samples, of which :attr:`names` has the names; ``index`` is the first."""

    full_state_update = False
    names: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            self.add_state(name, [], dist_reduce_fx="cat")

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            getattr(self, name).append(value)

    def compute(self) -> dict[str, Tensor]:
        """Returns the values of all names, each [S, ...], of S samples, sorted by index; a sample
        that several ranks have seen appears once.
        """
        found = {name: dim_zero_cat(getattr(self, name)) for name in self.names}
        # The first entry of each index.
        _, places_S = np.unique(found["index"].cpu().numpy(), return_index=True)
        chosen_S = torch.from_numpy(places_S)
        return {name: value.cpu()[chosen_S] for name, value in found.items()}


class Predictions(PerSample):
    """Predicted class of each sample, with its probability and the sample's label and index."""

    names = ("index", "label", "prediction", "probability")

    def update(self, batch: Mapping[str, Tensor], logits: Tensor) -> None:
        self.add(predictions_of(batch, logits))


def predictions_of(batch: Mapping[str, Tensor], logits_BK: Tensor) -> dict[str, Tensor]:
    """Returns ``prediction`` (:func:`predicted`), its ``probability``, NaN where logits are not
    finite, and the batch's ``index`` and ``label``; all [B].
    """
    probability_B, prediction_B = logits_BK.detach().softmax(1).max(1)
    return {
        "index": batch["index"],
        "label": batch["label"],
        "prediction": torch.where(probability_B.isfinite(), prediction_B, UNPREDICTED),
        "probability": probability_B,
    }


def confusion_of(logits: Tensor, label: Tensor) -> Tensor:
    """Counts labels from 0 to K - 1, true class by row, predicted by column; int64 [K, K + 1], of
    which the last column counts logits that are not finite.
    """
    num_classes = logits.shape[1]
    if label.dtype.is_floating_point:
        guess_N = predicted(logits)
        guess_NJ = F.one_hot(torch.where(guess_N < 0, num_classes, guess_N), num_classes + 1)
        return (label.double().T @ guess_NJ.double()).round().long()  # exact up to 2^53 points
    each = torch.tensor([*range(num_classes), UNPREDICTED], device=logits.device)
    each = each.view(1, -1, *[1] * (logits.dim() - 2))
    is_predicted = predicted(logits).unsqueeze(1) == each
    true, others = label.unsqueeze(1), [0, *range(2, logits.dim())]
    return torch.stack([(is_predicted & (true == k)).sum(others) for k in range(num_classes)])


def known_columns(counts: Tensor) -> Tensor:
    """Returns counts [K, K + 1] without their last column if all logits were finite."""
    return counts if counts[:, -1].any() else counts[:, :-1]


def ious_of(counts: Tensor) -> Tensor:
    """Returns intersection over union [K] of counts [K, K] or [K, K + 1]; NaN for a class that
    neither occurs nor is predicted.
    """
    hits_K = counts.diagonal()
    return hits_K / (counts.sum(0)[: len(hits_K)] + counts.sum(1) - hits_K)
