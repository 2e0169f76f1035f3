"""Losses of samples, voxels and points.

Labels are classes, int64 [B] of samples or [B, *spatial] of voxels, or counts: floating [N, K], the
number of points of each class in each voxel. Logits are [B, K], [B, K, *spatial] or [N, K]. A loss
of counts is that of the points, each of which has the logits of its voxel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsepipe.models.metrics import IGNORED


def mean_loss(
    logits: Tensor,
    label: Tensor,
    *,
    class_weights_K: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, float]:
    """Returns the mean cross-entropy, as PyTorch's, and the sum of weights that it was divided by.

    Without ``class_weights_K`` that sum is the number of labels that count: those of samples,
    voxels or points other than -100. Where it is 0, the loss is 0, not NaN as PyTorch's.
    """
    weights_K = None if class_weights_K is None else class_weights_K.to(logits.dtype)
    if label.dtype.is_floating_point:
        counts_K = label.double().sum(0)
        total = float(counts_K.sum() if weights_K is None else counts_K @ weights_K.double())
        target_NK = (1 - label_smoothing) * label
        if label_smoothing:
            target_NK = target_NK + label_smoothing / label.shape[1] * label.sum(1, keepdim=True)
        loss = F.cross_entropy(logits, target_NK, weights_K, reduction="sum")
        return (loss / total if total else 0 * logits.sum()), total
    if weights_K is not None:
        total = float(weights_K.double()[label[label != IGNORED]].sum())
    else:
        total = int((label != IGNORED).sum()) if label.dim() > 1 else label.numel()
    if not total:
        return 0 * logits.sum(), 0
    return F.cross_entropy(logits, label, weights_K, label_smoothing=label_smoothing), total


def lovasz_softmax(logits: Tensor, label: Tensor) -> Tensor:
    """Returns the Lovász-Softmax loss, the mean over the classes that occur; 0 without labels.

    The points of a class in a voxel have equal errors, whose terms telescope to one: counts give
    exactly the loss of the points.

    Source: Berman, Rannen Triki and Blaschko, "The Lovász-Softmax loss" (CVPR 2018), equation 9 and
    algorithm 1.
    """
    if not label.dtype.is_floating_point:
        classes_M = label.flatten()
        logits = logits.movedim(1, -1).flatten(0, -2)
        label = F.one_hot(classes_M.clamp(min=0), logits.shape[1]) * (classes_M >= 0).unsqueeze(1)
    shares_KN, counts_KN = logits.softmax(1).T, label.double().T
    others_KN = counts_KN.sum(0) - counts_KN
    # First the points of the class itself, with errors 1 - p, then all others, with errors p.
    both_KM = torch.cat([1 - shares_KN, shares_KN], 1)
    errors_KM, order_KM = both_KM.sort(dim=1, descending=True, stable=True)
    blank_KN = torch.zeros_like(counts_KN)
    own_KM = torch.cat([counts_KN, blank_KN], 1).gather(1, order_KM).cumsum(1)
    foreign_KM = torch.cat([blank_KN, others_KN], 1).gather(1, order_KM).cumsum(1)
    of_class_K1 = counts_KN.sum(1, keepdim=True)
    # The union is empty for classes without points alone, which are left out below.
    losses_KM = 1 - (of_class_K1 - own_KM) / (of_class_K1 + foreign_KM).clamp(min=1)
    steps_KM = losses_KM.diff(dim=1, prepend=torch.zeros_like(of_class_K1)).to(logits.dtype)
    losses_K = (errors_KM * steps_KM).sum(1)
    occurs_K = of_class_K1.squeeze(1) > 0
    return torch.where(occurs_K, losses_K, 0).sum() / occurs_K.sum().clamp(min=1)


def soft_dice(logits: Tensor, label: Tensor) -> Tensor:
    """Returns 1 minus the soft Dice coefficient of the batch, the mean over the classes that occur,
    background included; 0 without labels.

    A class of which label and probabilities add up to G and P, and their products to I, has the
    coefficient 2 I / (G + P), each summed over all labels of the batch.

    Sources: Milletari, Navab and Ahmadi, "V-Net" (3DV 2016), section 3, whose P sums squares; and
    Isensee et al., "nnU-Net" (2021), methods, "Training schedule", whose sums these are.
    """
    if label.dtype.is_floating_point:
        own, seen = label, label.sum(1, keepdim=True)
    else:
        each_K = torch.arange(logits.shape[1], device=logits.device)
        own = label.unsqueeze(1) == each_K.view(1, -1, *[1] * (logits.dim() - 2))
        seen = label.unsqueeze(1) != IGNORED
    others, shares = [0, *range(2, logits.dim())], logits.softmax(1)
    of_class_K = own.sum(others)
    both_K = of_class_K + (shares * seen).sum(others)
    # At least 1 for classes that occur; the others are left out.
    losses_K = 1 - 2 * (shares * own).sum(others) / both_K.clamp(min=1)
    occurs_K = of_class_K > 0
    return torch.where(occurs_K, losses_K, 0).sum() / occurs_K.sum().clamp(min=1)
