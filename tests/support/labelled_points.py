"""Points in voxels, with labels of points and what voxels make of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsepipe.models.metrics import IGNORED

CLASSES = 4


@dataclass(frozen=True, slots=True)
class LabelledPoints:
    """Logits [N, K] of voxels, the voxel and label of each point [P], and counts [N, K]."""

    logits_NK: Tensor
    rows_P: Tensor
    labels_P: Tensor
    counts_NK: Tensor


def points_in_voxels(
    seed: int, *, bad: float | None = None, voxels: int = 12, points: int = 90
) -> LabelledPoints:
    """Mixed voxels, one that is empty, some points that do not count; a class may be missing."""
    generator = torch.Generator().manual_seed(seed)
    logits_NK = torch.randn(voxels, CLASSES, generator=generator, dtype=torch.float64)
    if bad is not None:
        logits_NK[2, 1] = bad
    rows_P = torch.randint(1, voxels, (points,), generator=generator)
    labels_P = torch.randint(CLASSES - seed % 2, (points,), generator=generator)
    labels_P[torch.rand(points, generator=generator) < 0.2] = IGNORED
    counts_NK = torch.zeros(voxels, CLASSES, dtype=torch.float64)
    for row, label in zip(rows_P.tolist(), labels_P.tolist(), strict=True):
        if label != IGNORED:
            counts_NK[row, label] += 1
    return LabelledPoints(logits_NK, rows_P, labels_P, counts_NK)
