"""Scores of single cases, samples with a label for each voxel: overlap and distance of surfaces.

Shape suffixes: K classes, S cases. Class 0 is the background.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import KDTree
from torch import Tensor

from sparsepipe.models.metrics import PerSample, predicted

_DRAWN = 2
"""Number of the worst and of the best cases of which slices are kept."""


class CaseScores(PerSample):
    """Dice coefficient, IoU and surface distance in mm of each class in each case; each [S, K].

    Cases that are cut into shards are scored as a whole, on every rank. A spacing that is NaN is
    unknown, and then so is the distance.

    Attributes:
        drawn: ``index``, ``dice`` (:func:`mean_dice`) and ``slices`` (:func:`slices_of`) of the
            worst and the best cases that this process has seen, the worst first.
    """

    names = ("index", "dice", "iou", "surface_mm")

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[dict[str, Any]] = []

    def update(self, batch: Mapping[str, Tensor], logits: Tensor) -> None:
        label_B = _on_host(batch["label"].to(torch.int16))
        prediction_B = _on_host(predicted(logits).to(torch.int16))
        spacing_BD, index_B = batch["spacing"].tolist(), batch["index"]
        for b, index in enumerate(index_B.tolist()):
            label, prediction = label_B[b].numpy(), prediction_B[b].numpy()
            scores_3K = scores_of(
                label, prediction, num_classes=logits.shape[1], spacing_mm=spacing_BD[b]
            )
            values = torch.from_numpy(scores_3K).to(index_B.device).unsqueeze(1)
            self.add(dict(zip(self.names, (index_B[b : b + 1], *values), strict=True)))
            case = {"index": index, "dice": mean_dice(values[0])[0].item(), "slices": None}
            self.keep([case])
            if any(case is each for each in self.drawn):
                image = batch["input"][b, 0]
                # The last stage of a pipeline has the shape of the input only.
                image = torch.zeros(label.shape) if image.is_meta else _on_host(image)
                case["slices"] = slices_of(
                    image.numpy(), label, prediction, spacing_mm=spacing_BD[b]
                )

    def keep(self, cases: Iterable[dict[str, Any]]) -> None:
        """Keeps the worst and the best of these cases and those that are kept already."""
        known = {each["index"]: each for each in (*self.drawn, *cases)}
        ranked = sorted((np.nan_to_num(each["dice"], nan=1), n) for n, each in known.items())
        self.drawn = [known[index] for _, index in ranked]
        del self.drawn[_DRAWN:-_DRAWN]

    def reset(self) -> None:
        super().reset()
        self.drawn = []


def _on_host(value: Any) -> Tensor:
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().cpu()


def mean_dice(dice_SK: Tensor) -> Tensor:
    """Returns the mean Dice coefficient [S] over the classes but the background; NaN without."""
    return dice_SK[:, 1:].nanmean(1)


def scores_of(
    label: NDArray[np.int16],
    prediction: NDArray[np.int16],
    *,
    num_classes: int,
    spacing_mm: Sequence[float],
) -> NDArray[np.float64]:
    """Returns the Dice coefficients, IoUs and surface distances in mm of a case, [3, K].

    They are NaN for a class that neither occurs nor is predicted. A surface distance is the mean
    over the surface voxels of the label and of the prediction of the distance to the nearest
    surface voxel of the other; it is infinite where only one of them has any, and NaN where neither
    has or the spacing is unknown. Surface voxels of a class have a face in common with a voxel of
    another class, or with the border of the box around all voxels that have a class in ``label``.

    Voxels without one do not count: neither label nor prediction has any class there, and being
    next to one of them makes no voxel a surface voxel.

    Source: Heimann et al., "Comparison and Evaluation of Methods for Liver Segmentation From CT
    Datasets" (2009), section II-C: average symmetric surface distance.
    """
    scores_3K = np.full((3, num_classes), np.nan)
    # Volumes of unlike sizes are padded with voxels that have no class.
    (known,) = ndimage.find_objects((label >= 0).view(np.int8)) or [(slice(0),) * label.ndim]
    label, prediction = label[known], prediction[known]
    unknown = label < 0
    for k in range(num_classes):
        true, found = label == k, (prediction == k) & ~unknown
        both, either = np.count_nonzero(true & found), true | found
        if not (count := np.count_nonzero(either)):
            continue
        # One voxel more on each side, on which the surfaces within depend.
        (inside,) = ndimage.find_objects(either.view(np.int8))
        box = tuple(slice(max(each.start - 1, 0), each.stop + 1) for each in inside)
        places = []
        for mask in (true[box], found[box]):
            surface = mask & ~ndimage.binary_erosion(mask | unknown[box])
            places.append(np.argwhere(surface) * np.asarray(spacing_mm))
        distance = math.inf if any(map(len, places)) else math.nan
        if np.isnan(spacing_mm).any():
            distance = math.nan
        elif all(map(len, places)):  # trees are several times as fast as distance transforms
            pairs = places, places[::-1]
            found_mm = [KDTree(a, balanced_tree=False).query(b)[0] for a, b in pairs]
            distance = np.concatenate(found_mm).mean()
        scores_3K[:, k] = 2 * both / (count + both), both / count, distance
    return scores_3K


def slices_of(
    image: NDArray[Any],
    label: NDArray[np.int16],
    prediction: NDArray[np.int16],
    *,
    spacing_mm: Sequence[float],
) -> list[dict[str, Any]]:
    """Returns the slices of a case along each two axes in which most of its largest class but the
    background lies: ``axes`` and, along these, ``spacing_mm``, ``image``, ``label`` and
    ``prediction``.
    """
    slices, axes_D, centre_D = [], range(label.ndim), [size // 2 for size in label.shape]
    for classes in (label, prediction):
        if (last := int(classes.max())) > 0:
            counts = [np.bincount(row.clip(0).ravel(), minlength=last + 1) for row in classes]
            mask = classes == np.sum(counts, axis=0)[1:].argmax() + 1
            centre_D = [int(mask.sum(tuple({*axes_D} - {d})).argmax()) for d in axes_D]
            break
    for axes in itertools.combinations(axes_D, 2):
        place = tuple(slice(None) if d in axes else centre_D[d] for d in axes_D)
        cut = {"image": image[place], "label": label[place], "prediction": prediction[place]}
        found = {name: values.copy() for name, values in cut.items()}
        slices.append({"axes": axes, "spacing_mm": [spacing_mm[d] for d in axes], **found})
    return slices
