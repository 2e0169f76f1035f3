"""Logs and metrics of ranks and microbatches are put together as those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from sparsepipe.strategies.metrics import Metrics
from sparsepipe.strategies.pipeline.logging import Logged, merge_logs


def note(
    value: Any,
    name: str = "loss",
    *,
    dtype: Any = torch.float32,
    metric: str | None = None,
    **o: Any,
) -> Logged:
    return Logged(name, value, dtype, metric, o)


def test_means_count_samples() -> None:
    (found,) = merge_logs([(3, (note(1.0),)), (2, (note(2.0),)), (2, (note(4.0),))])
    assert found == note((3 + 4 + 8) / 7)


def test_sizes_that_were_logged_count_before_those_of_the_microbatches() -> None:
    """As where a step weights by something else than samples; they add up."""
    (found,) = merge_logs([(3, (note(1.0, batch_size=10),)), (2, (note(2.0, batch_size=30),))])
    assert found == note(1.75, batch_size=40)


@pytest.mark.parametrize(
    ("reduce_fx", "value"),
    [("sum", 7.0), (torch.sum, 7.0), ("max", 4.0), ("min", 1.0), (torch.max, 4.0), ("mean", 2.2)],
)
def test_values_are_reduced_as_over_steps(reduce_fx: Any, value: float) -> None:
    parts = [
        (samples, (note(number, reduce_fx=reduce_fx),))
        for samples, number in ((2, 1.0), (2, 2.0), (1, 4.0))
    ]
    (found,) = merge_logs(parts)
    if reduce_fx == "mean":
        value = (2 * 1 + 2 * 2 + 4) / 5
    assert found == note(value, reduce_fx=reduce_fx)


def test_equal_values_stay_what_they_are() -> None:
    (found,) = merge_logs([(samples, (note(0.1, dtype=None),)) for samples in (3, 3, 7)])
    assert found.value == 0.1


def test_means_of_counts_are_fractions() -> None:
    (found,) = merge_logs([(1, (note(1, dtype=torch.int64),)), (1, (note(2, dtype=torch.int64),))])
    assert (found.value, found.dtype) == (1.5, torch.float32)
    (total,) = merge_logs([(1, (note(2, dtype=torch.int64, reduce_fx="sum"),))] * 2)
    assert (total.value, total.dtype) == (4, torch.int64)


def test_metrics_without_a_value_have_none() -> None:
    with_value = note(0.5, "accuracy", metric="accuracy")
    without = note(None, "accuracy", dtype=None, metric="accuracy")
    assert merge_logs([(1, (with_value,)), (3, (without,))])[0].value is None
    (found,) = merge_logs([(1, (with_value,)), (3, (note(0.75, "accuracy", metric="accuracy"),))])
    assert (found.value, found.metric) == (0.6875, "accuracy")


def test_calls_are_matched_by_name_and_order() -> None:
    """Also where a microbatch leaves some out."""
    first = (note(1.0, "a"), note(2.0, "b"), note(3.0, "a"))
    second = (note(5.0, "a"), note(7.0, "c"))
    found = merge_logs([(1, first), (1, second)])
    assert [(each.name, each.value) for each in found] == [
        ("a", 3.0), ("b", 2.0), ("a", 3.0), ("c", 7.0)
    ]  # fmt: skip


def test_logs_of_a_single_microbatch_stay_as_they_are() -> None:
    logs = (note(1.0), note(2, dtype=torch.int64))
    assert merge_logs([(5, logs)]) is logs


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
