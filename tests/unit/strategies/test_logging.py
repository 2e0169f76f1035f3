"""Logs and metrics of ranks and microbatches are put together as those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from sparsepipe.strategies.metrics import Metrics
from sparsepipe.strategies.pipeline.logging import Logged, LogReplay, merge_logs
from tests.support.pipeline_cases import plain_trainer

BATCHES = 5


class Twice(pl.LightningModule):
    """Logs every value itself, and has it repeated under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.metric = MeanMetric()
        self.again = MeanMetric()
        self.calls: list[str] = []
        self.seen: list[dict[str, float]] = []

    def setup(self, stage: str) -> None:
        self.repeater = LogReplay(self)

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls.append(name)
        super().log(name, *args, **kwargs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value, size = batch.mean(), len(batch)
        both = {"on_step": True, "on_epoch": True}
        largest = {"reduce_fx": "max", "on_epoch": True}
        self.metric(value)
        self.again(value)
        self.log("value", value, batch_size=size, **both)
        self.log("last", value, on_epoch=False)
        self.log("largest", value, batch_size=size, **largest)
        self.log("metric", self.metric, **both)
        notes = (
            Logged("value2", value.item(), value.dtype, None, {"batch_size": size, **both}),
            Logged("last2", value.item(), value.dtype, None, {"on_epoch": False}),
            Logged("largest2", value.item(), value.dtype, None, {"batch_size": size, **largest}),
            Logged("metric2", value.item(), value.dtype, "again", both),
        )
        self.repeater.append([notes], hook="training_step")
        self.seen.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})
        return (self.weight * value).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_repeated_values_are_those_of_self_log() -> None:
    values = torch.rand(3 * BATCHES - 1, 4, generator=torch.Generator().manual_seed(1)) ** 3
    module = Twice()
    trainer = plain_trainer(max_epochs=2)
    trainer.fit(module, DataLoader(values, batch_size=3))  # the last one is smaller
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found["value_epoch"] == pytest.approx(float(values.mean()))
    assert found["largest"] > found["value_epoch"]
    for name in ("value_step", "value_epoch", "last", "largest", "metric_step", "metric_epoch"):
        base, _, kind = name.partition("_")
        other = f"{base}2_{kind}" if kind else f"{base}2"
        assert found[other] == found[name], name
        assert [entry.get(other) for entry in module.seen] == [
            entry.get(name) for entry in module.seen
        ]
    assert module.calls.count("value") == 2 * BATCHES
    assert module.calls.count("value2") <= 2  # once an epoch at most


def test_other_options_for_the_same_name_are_refused_as_by_self_log() -> None:
    class Changing(Twice):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            options = {"on_epoch": batch_idx == 0, "batch_size": 3}
            note = Logged("value", 1.0, torch.float32, None, options)
            self.repeater.append([(note,)], hook="training_step")
            return self.weight.sum()

    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="twice"):
        plain_trainer(max_epochs=1).fit(Changing(), DataLoader(torch.rand(6, 4), batch_size=3))


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
