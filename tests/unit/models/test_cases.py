"""Scores of cases beside MONAI and a brute force, and what is kept of the worst and best cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from monai.metrics import compute_average_surface_distance, compute_dice, compute_iou
from scipy import ndimage

from sparsepipe.models.cases import CaseScores, mean_dice, scores_of, slices_of
from sparsepipe.models.metrics import IGNORED

CLASSES = 4


def blobs(seed: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Smooth classes, of which the last one is missing."""
    noise = np.random.default_rng(seed).normal(size=(CLASSES - 1, *sizes))
    return ndimage.gaussian_filter(noise, [0, *[1.5] * len(sizes)]).argmax(0).astype(np.int16)


@pytest.mark.parametrize("spacing", [[1.0, 1.0, 1.0], [0.7, 2.5, 1.2]])
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_monai(seed: int, spacing: list[float]) -> None:
    sizes = (11, 14, 9)
    label, prediction = blobs(seed, sizes), blobs(seed + 10, sizes)
    prediction[:4] = label[:4]
    mine = scores_of(label, prediction, num_classes=CLASSES, spacing_mm=spacing)
    one_hot = [
        torch.from_numpy(np.stack([each == k for k in range(CLASSES)]))[None].float()
        for each in (prediction, label)
    ]
    theirs = [
        compute_dice(*one_hot, ignore_empty=False),
        compute_iou(*one_hot, ignore_empty=False),
        compute_average_surface_distance(
            *one_hot, include_background=True, symmetric=True, spacing=spacing
        ),
    ]
    for mine_K, theirs_1K in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(mine_K[:-1], theirs_1K[0, :-1], rtol=1e-5)
    assert np.isnan(mine[:, -1]).all(), "neither occurs nor is predicted"


def brute_force(label: np.ndarray, prediction: np.ndarray, k: int, spacing: list[float]) -> float:
    """The distance of all pairs of surface voxels, found voxel by voxel."""
    known = np.argwhere(label != IGNORED)
    inside = tuple(map(slice, known.min(0), known.max(0) + 1))
    label, prediction, surfaces = label[inside], prediction[inside], []
    for values in (label, prediction):
        found = []
        for place in np.argwhere((values == k) & (label != IGNORED)):
            for axis, step in np.ndindex(label.ndim, 2):
                near = place.copy()
                near[axis] += 2 * step - 1
                is_outside = not 0 <= near[axis] < label.shape[axis]
                if is_outside or (label[*near] != IGNORED and values[*near] != k):
                    found.append(place * spacing)
                    break
        surfaces.append(np.array(found))
    distances = np.linalg.norm(surfaces[0][:, None] - surfaces[1], axis=-1)
    return float(np.concatenate([distances.min(0), distances.min(1)]).mean())


@pytest.mark.parametrize("sizes", [(13,), (9, 12), (6, 7, 8)])
def test_voxels_without_labels_do_not_count(sizes: tuple[int, ...]) -> None:
    spacing = [1.5, 0.8, 2.0][: len(sizes)]
    label, prediction = blobs(1, sizes), blobs(2, sizes)
    hidden = np.random.default_rng(3).random(sizes) < 0.1
    hidden[: sizes[0] // 3] = True
    label[hidden] = IGNORED
    scores = scores_of(label, prediction, num_classes=CLASSES, spacing_mm=spacing)
    for k in np.unique(label[~hidden]):
        true, found = label[~hidden] == k, prediction[~hidden] == k
        assert scores[0, k] == 2 * (true & found).sum() / (true.sum() + found.sum())
        assert scores[1, k] == (true & found).sum() / (true | found).sum()
        if found.any():
            expected = brute_force(label, prediction, k, spacing)
            assert scores[2, k] == pytest.approx(expected, rel=1e-12)
    other = np.where(hidden, 3 - prediction, prediction)
    again = scores_of(label, other, num_classes=CLASSES, spacing_mm=spacing)
    np.testing.assert_array_equal(again, scores)


def test_a_class_that_is_missed_is_infinitely_far() -> None:
    label = np.zeros((4, 4, 4), np.int16)
    label[1, 1, 1] = 1
    scores = scores_of(label, 0 * label, num_classes=2, spacing_mm=[1.0] * 3)
    assert scores[:, 1].tolist() == [0, 0, np.inf]
    enclosed = np.full((5, 5, 5), IGNORED, np.int16)
    enclosed[0, 0, 0], enclosed[2, 2, 2], enclosed[4, 4, 4] = 0, 1, 0
    scores = scores_of(enclosed, 0 * enclosed, num_classes=2, spacing_mm=[1.0] * 3)
    assert scores[:2, 1].tolist() == [0, 0]
    assert np.isnan(scores[2, 1]), "it has no surface"


@pytest.mark.parametrize("widths", [(0, 4), (3, 2)])
def test_padding_and_an_unknown_spacing(widths: tuple[int, int]) -> None:
    label, prediction, spacing = blobs(0, (8, 9, 7)), blobs(4, (8, 9, 7)), [1.0, 2.0, 3.0]
    expected = scores_of(label, prediction, num_classes=CLASSES, spacing_mm=spacing)
    label, prediction = np.pad(label, widths, constant_values=IGNORED), np.pad(prediction, widths)
    padded = scores_of(label, prediction, num_classes=CLASSES, spacing_mm=spacing)
    np.testing.assert_array_equal(padded, expected)
    unknown = scores_of(label, prediction, num_classes=CLASSES, spacing_mm=[np.nan] * 3)
    np.testing.assert_array_equal(unknown[:2], expected[:2])
    assert np.isnan(unknown[2]).all()
    nothing = scores_of(0 * label + IGNORED, label, num_classes=2, spacing_mm=spacing)
    assert np.isnan(nothing).all()


def test_slices_of_the_two_worst_and_the_two_best_cases_are_kept() -> None:
    metric, sizes = CaseScores(), (6, 8, 10)
    label = torch.zeros(7, *sizes, dtype=torch.int64)
    label[:, 1:5, 2:6, 3:9] = 2
    label[:, 0, 0, 0] = 1
    x = torch.arange(480.0).view(1, 1, *sizes).repeat(7, 2, 1, 1, 1)
    for index in torch.randperm(7, generator=torch.Generator().manual_seed(0)).tolist():
        guess = label[index].clone()
        guess[1 : index % 4 + 1] = 0  # of 3 wrong ones, all but one occur twice
        logits = torch.nn.functional.one_hot(guess, 3).movedim(-1, 0)[None].float()
        batch = {"input": x[:1], "label": label[index][None], "index": torch.tensor([index])}
        metric.update({**batch, "spacing": torch.tensor([[1.0, 2.0, 3.0]])}, logits)
    found = metric.compute()
    assert found["index"].tolist() == [*range(7)]
    mean_S = mean_dice(found["dice"])
    assert [each["index"] for each in metric.drawn] == [3, 2, 0, 4]
    for case in metric.drawn:
        assert case["dice"] == mean_S[case["index"]]
        assert [each["axes"] for each in case["slices"]] == [(0, 1), (0, 2), (1, 2)]
        centre = [1, 2, 3]  # the first of those with most of a box
        for each in case["slices"]:
            place = tuple(slice(None) if d in each["axes"] else centre[d] for d in range(3))
            np.testing.assert_array_equal(each["image"], x[0, 0][place])
            np.testing.assert_array_equal(each["label"], label[0][place])
            assert each["spacing_mm"] == [d + 1.0 for d in each["axes"]]
    metric.reset()
    assert metric.drawn == []
    on_last_stage = {**batch, "input": batch["input"].to("meta")}
    metric.update({**on_last_stage, "spacing": torch.ones(1, 3)}, logits)
    assert metric.drawn[0]["slices"][0]["image"].shape == sizes[:2], "in a pipeline"


def test_slices_show_a_class_whose_middle_is_outside_of_it() -> None:
    label = np.zeros((9, 7, 5), np.int16)
    label[1:3, 1, 2], label[6:9, 5, 4] = 1, 1
    nothing = np.zeros_like(label)
    for given, found in ((label, nothing), (nothing, label)):
        cuts = slices_of(nothing, given, found, spacing_mm=[1.0] * 3)
        assert [max((each["label"] | each["prediction"]).max(), 0) for each in cuts] == [1, 1, 1]
        assert [int((each["label"] + each["prediction"]).sum()) for each in cuts[:2]] == [3, 3]
    cuts = slices_of(np.arange(315).reshape(9, 7, 5), nothing, nothing, spacing_mm=[1.0] * 3)
    assert cuts[2]["image"][0, 0] == 4 * 35, "without a class, slices are in the middle"
    assert slices_of(*[nothing[:, 0, 0]] * 3, spacing_mm=[1.0]) == []
