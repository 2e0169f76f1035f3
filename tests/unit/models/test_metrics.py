"""Metrics of samples and voxels beside torchmetrics' and counts by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassJaccardIndex,
)

from sparsepipe.models.metrics import (
    COUNTED,
    IGNORED,
    UNPREDICTED,
    Accuracy,
    ClassAccuracy,
    Confusion,
    MeanIoU,
    Predictions,
    ious_of,
    predictions_of,
)
from tests.support.labelled_points import CLASSES, points_in_voxels


def batches(size: tuple[int, ...], *, ignored: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    found = []
    for _ in range(3):
        logits = torch.randn(5, CLASSES, *size)
        label = torch.randint(CLASSES, (5, *size))
        if ignored:
            label[torch.rand(5, *size) < 0.3] = IGNORED
        found.append((logits, label))
    return found


@pytest.mark.parametrize("size", [(), (7,), (4, 5), (3, 4, 2)])
@pytest.mark.parametrize("ignored", [False, True])
def test_they_are_torchmetrics(size: tuple[int, ...], ignored: bool) -> None:
    if ignored and not size:
        pytest.skip("labels of samples are never ignored")
    more = {"ignore_index": IGNORED} if ignored else {}
    pairs = [
        (Accuracy(), MulticlassAccuracy(CLASSES, average="micro", **more)),
        (Confusion(CLASSES), MulticlassConfusionMatrix(CLASSES, **more)),
        (MeanIoU(CLASSES), MulticlassJaccardIndex(CLASSES, **more)),
    ]
    for mine, theirs in pairs:
        for batch in batches(size, ignored=ignored):
            torch.testing.assert_close(mine(*batch), theirs(*batch))
        torch.testing.assert_close(mine.compute(), theirs.compute())
        mine.reset()
        batch = batches(size, ignored=ignored)[1]
        mine.update(*batch)
        theirs.reset()
        theirs.update(*batch)
        torch.testing.assert_close(mine.compute(), theirs.compute())


@pytest.mark.parametrize("bad", [None, math.nan])
def test_metrics_of_counts_are_those_of_the_points(bad: float | None) -> None:
    """Beside torchmetrics, with a further class that logits predict where they are not finite."""
    more = {"ignore_index": IGNORED}
    pairs = [
        (Accuracy(), MulticlassAccuracy(CLASSES + 1, average="micro", **more)),
        (Confusion(CLASSES), MulticlassConfusionMatrix(CLASSES + 1, **more)),
        (
            MeanIoU(CLASSES),
            MulticlassJaccardIndex(CLASSES + 1, average="none", ignore_index=IGNORED),
        ),
        (
            ClassAccuracy(CLASSES),
            MulticlassAccuracy(CLASSES + 1, average="none", ignore_index=IGNORED),
        ),
    ]
    for seed in range(3):
        scene = points_in_voxels(seed, bad=bad)
        guess_P = scene.logits_NK.argmax(1)[scene.rows_P]
        guess_P[scene.logits_NK.isnan().any(1)[scene.rows_P]] = CLASSES
        for mine, theirs in pairs:
            mine.update(scene.logits_NK, scene.counts_NK)
            theirs.update(guess_P, scene.labels_P)
    accuracy, confusion, iou, accuracies = (theirs.compute() for _, theirs in pairs)
    assert pairs[0][0].compute() == accuracy
    counts = pairs[1][0].compute()
    assert torch.equal(counts, confusion[:-1, : counts.shape[1]])
    assert counts.shape[1] == CLASSES + (bad is not None)
    assert COUNTED[int(pairs[1][0].counted)] == "points"
    torch.testing.assert_close(pairs[2][0].compute(), iou[:-1].mean())
    torch.testing.assert_close(pairs[3][0].compute(), accuracies[:-1].mean())


@pytest.mark.parametrize("size", [(), (4, 5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong(size: tuple[int, ...], bad: float) -> None:
    """As a prediction of a further class, which no sample has; -inf of some classes is right."""
    pairs = [
        (Accuracy(), MulticlassAccuracy(CLASSES + 1, average="micro")),
        (Confusion(CLASSES), MulticlassConfusionMatrix(CLASSES + 1)),
        (MeanIoU(CLASSES), MulticlassJaccardIndex(CLASSES + 1, average="none")),
    ]
    for logits, label in batches(size, ignored=False):
        logits[0, 1], logits[1, 2] = bad, -math.inf
        predicted = logits.argmax(1)
        predicted[0] = CLASSES
        for mine, theirs in pairs:
            mine.update(logits, label)
            theirs.update(predicted, label)
    accuracy, confusion, iou = (theirs.compute() for _, theirs in pairs)
    assert pairs[0][0].compute() == accuracy
    assert torch.equal(pairs[1][0].compute(), confusion[:-1])
    torch.testing.assert_close(pairs[2][0].compute(), iou[:-1].mean())
    if not size:
        found = predictions_of({"index": label, "label": label}, logits)
        assert found["prediction"].tolist() == [UNPREDICTED, *predicted[1:].tolist()]


def test_a_class_that_nobody_saw_has_no_iou() -> None:
    counts = torch.tensor([[3, 1, 0], [2, 4, 0], [0, 0, 0]])
    assert ious_of(counts)[:2].tolist() == pytest.approx([3 / 6, 4 / 7])
    assert ious_of(counts)[2].isnan()
    mean = MeanIoU(3)
    mean.confmat[:, :3] += counts
    mean._update_count = 1
    assert float(mean.compute()) == pytest.approx((3 / 6 + 4 / 7) / 2)


def test_predictions_of_several_ranks_are_each_there_once_in_the_order_of_the_split() -> None:
    logits_S2 = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0], [3.0, 0.0]])
    metric = Predictions()
    for index in ([3, 1], [2, 0, 1]):  # as of two ranks that share sample 1
        batch = {"index": torch.tensor(index), "label": torch.tensor(index) % 2}
        metric.update(batch, logits_S2[index])
    found = metric.compute()
    assert found["index"].tolist() == [0, 1, 2, 3]
    assert found["label"].tolist() == [0, 1, 0, 1]
    assert found["prediction"].tolist() == [0, 1, 0, 0]
    expected = [1 / (1 + math.exp(-gap)) for gap in (2, 1, 0, 3)]
    assert found["probability"].tolist() == pytest.approx(expected)
