"""Metrics of the last stage's replicas, beside those of one process that sees all minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from sparsepipe.strategies.metrics import Metrics

CLASSES, BATCH = 3, 4


class Module(nn.Module):
    """Metrics for training and for validation: sums, lists, and some that share a state."""

    def __init__(self) -> None:
        super().__init__()
        for when in ("train", "val"):
            self.add_module(f"{when}_accuracy", MulticlassAccuracy(CLASSES, average="micro"))
            self.add_module(f"{when}_all", CatMetric())
            self.add_module(
                f"{when}_both",
                MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)]),
            )
        self.add_module("train_mean", MeanMetric())

    def update(self, when: str, batch: tuple[Tensor, Tensor]) -> None:
        scores_BK, label_B = batch
        self.get_submodule(f"{when}_accuracy")(scores_BK, label_B)  # as in a step: forward
        self.get_submodule(f"{when}_all").update(label_B)
        self.get_submodule(f"{when}_both").update(scores_BK, label_B)
        if when == "train":
            self.train_mean.update(scores_BK)

    def values(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for name, metric in self.named_modules():
            if isinstance(metric, Metric) and metric.update_called:
                found[name] = sorted(metric.compute().reshape(-1).tolist())
        return found


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    for seed in count():
        rng = torch.Generator().manual_seed(seed)
        scores_BK = torch.rand(BATCH, CLASSES, generator=rng)
        yield scores_BK, torch.randint(CLASSES, (BATCH,), generator=rng)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_rank_has_what_one_process_has(replicas: int) -> None:
    """Also while a validation, and another one, is between two parts of an epoch."""
    alone, ranks = Module(), [Module() for _ in range(replicas + 1)]  # one is of another stage
    all_metrics = [Metrics(rank) for rank in ranks]
    for metrics in all_metrics:
        metrics.synchronise(False)
    given = batches()
    for when in ("train", "val", "train", "val", "val", "train", "train"):
        for number in range(2 * replicas + 1):  # unevenly
            batch = next(given)
            alone.update(when, batch)
            with all_metrics[number % replicas].tracking():
                ranks[number % replicas].update(when, batch)
        parts = [metrics.take_updated() for metrics in all_metrics[:replicas]]
        for number, metrics in enumerate(all_metrics):
            metrics.merge(parts, replica=number if number < replicas else None)
        expected = alone.values()
        for number, rank in enumerate(ranks):
            found = rank.values()
            assert found.keys() == expected.keys(), (when, number)
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-6), (when, number, name)
