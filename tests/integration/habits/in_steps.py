"""Habits of steps: what they return, log, draw, keep and call."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from tests.integration.habits.habit import CLASSES, INPUTS, Base, Habit, hook, mlp, step


def _loss(self: Base, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self.layers(x), y)


class WithMetric(Base):
    """The loop of training and validation of torchmetrics' page on Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(CLASSES)
        self.valid_accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.layers(x)
        self.train_accuracy(logits, y)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=False)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.valid_accuracy(self.layers(batch[0]), batch[1])
        self.log("valid_accuracy", self.valid_accuracy, on_step=True, on_epoch=True)


class Computed(WithMetric):
    """Updates in the step, and computes in the hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch[0])
        self.train_accuracy.update(logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("epoch_accuracy", self.train_accuracy.compute())
        self.train_accuracy.reset()


class Outputs(Base):
    """Lightning 2's recipe in place of ``training_epoch_end``."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[Tensor] = []
        self.found: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.found.append(len(self.training_step_outputs))
        self.training_step_outputs.clear()


class Headed(Base):
    """A projection head after the layers, a buffer of class weights and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES).double()
        self.register_buffer("share", torch.linspace(1, 2, CLASSES).double())
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.head(self.layers(x))
        self.seen += len(y)
        return F.cross_entropy(logits, y, weight=self.share, reduction="none").mean()


class Embedded(Base):
    """A module with parameters before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, INPUTS).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(self.embed(batch[0])), batch[1])


class Distilled(Base):
    """A frozen teacher that sees what the layers see."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.layers(x)
        with torch.no_grad():
            taught = self.teacher(x).softmax(1)
        return F.cross_entropy(logits, y) + F.cross_entropy(logits, taught)


class LoggingByHand(Base):
    """After the call of the layers, on the rank that has the logger."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero:
            self.written += 1
        return loss


class Outside(Base):
    """The penalty is computed in a property that the step asks for."""

    @property
    def penalty(self) -> Tensor:
        return torch.stack([p.abs().sum() for p in self.parameters()]).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return _loss(self, *batch) + 1e-3 * self.penalty


def _mixed(self: Base, x: Tensor, y: Tensor) -> Tensor:
    share = float(np.random.beta(0.4, 0.4))  # noqa: NPY002 - as people write it
    order = torch.randperm(len(x))
    logits = self.layers(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])


def _gradient_penalty(self: Base, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    logits = self.layers(x)
    (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + gradient.square().mean()


def _on_the_device(self: Base, x: Tensor, y: Tensor) -> Tensor:
    first = next(self.parameters())
    sizes = sum(p.numel() for p in self.parameters() if p.requires_grad)
    assert sizes == sum(p.numel() for p in mlp().parameters())
    assert first.dtype == torch.float64
    return _loss(self, x, y.to(first.device))


def _logs(self: Base, x: Tensor, y: Tensor) -> Tensor:
    logits = self.layers(x)
    loss = F.cross_entropy(logits, y)
    self.log_dict({"a": loss, "b": logits.mean()}, on_step=True, on_epoch=True, prog_bar=True)
    self.log("most", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
    self.log("shared", loss, sync_dist=True, batch_size=len(x))
    return loss


def _detected(self: Base, x: Tensor, y: Tensor) -> Any:
    loss = _loss(self, x, y)
    return None if self.trainer.global_step == 1 else loss


STEPS = [
    Habit(
        written="`return None` to skip a batch",
        verdict="refused",
        note="return `0 * loss` for such a batch",
        module=step(_detected),
        message="training_step returned NoneType",
        early=False,
    ),
    Habit(
        written="`self.log`, `self.log_dict` with `on_step`, `on_epoch`, `reduce_fx`, `sync_dist`",
        verdict="same",
        module=step(_logs),
        synchronous=False,  # which merge what microbatches log by a mean
    ),
    Habit(
        written="a torchmetric that the step calls and logs",
        verdict="same",
        module=WithMetric,
        synchronous=False,  # on_step: of the last microbatch
    ),
    Habit(
        written="`metric.update` in the step, `metric.compute` in `on_train_epoch_end`",
        verdict="same",
        module=Computed,
    ),
    Habit(
        written="`self.training_step_outputs.append(...)` for `on_train_epoch_end`",
        verdict="different",
        note="empty but on the last stage: use a torchmetric",
        module=Outputs,
        seen=lambda trainer, module: module.found,
        differs=lambda plain, ranks: (plain, *ranks) == ([3, 3], [0, 0], [3, 3]),
        synchronous=False,
    ),
    Habit(
        written="a head after the layers, buffers, counters in buffers",
        verdict="same",
        module=Headed,
    ),
    Habit(
        written="a module with parameters before the layers (`self.layers(self.embed(x))`)",
        verdict="refused",
        note="move it to the front of the `Sequential`",
        module=Embedded,
        message="the input of layers needs a gradient",
        early=False,
    ),
    Habit(
        written="random draws of a step (mixup by `np.random.beta` and `torch.randperm`)",
        verdict="same",
        module=step(_mixed),
        synchronous=False,  # which draw once for each microbatch
    ),
    Habit(
        written="the input once more after the layers (autoencoders)",
        verdict="refused",
        note="`send_input=True` on the strategy",
        module=step(lambda self, x, y: (self.layers(x) - x[:, :CLASSES]).square().mean()),
        message="apart from calling them",
        early=False,
    ),
    Habit(
        written="the same with `send_input=True`",
        verdict="same",
        module=step(lambda self, x, y: (self.layers(x) - x[:, :CLASSES]).square().mean()),
        strategy={"send_input": True},
    ),
    Habit(
        written="the layers twice in a step (siamese networks)",
        verdict="refused",
        note="concatenate the two batches",
        module=step(lambda self, x, y: _loss(self, x, y) + self.layers(-x).mean()),
        message="calls layers twice",
        early=False,
    ),
    Habit(
        written="one layer called by itself (`self.layers[0]`)",
        verdict="refused",
        note="call the whole `Sequential`",
        module=step(lambda self, x, y: _loss(self, x, y) + self.layers[0](x).mean()),
        strategy={"send_input": True},
        message="layer layers.0 was called by itself",
        early=False,
    ),
    Habit(
        written="a penalty over `self.parameters()` in a step (L1, L2, EWC)",
        verdict="refused",
        note="`weight_decay`, or add its gradient in `on_before_optimizer_step`",
        module=Outside,
        message="a step uses layers.0.weight, which is on another rank",
        early=False,
    ),
    Habit(
        written="a penalty on `self.layers[0].weight`",
        verdict="refused",
        note="the same",
        module=step(lambda self, x, y: _loss(self, x, y) + self.layers[0].weight.norm()),
        message="a step uses layers.0.weight, which is on another rank",
        early=False,
    ),
    Habit(
        written="`next(self.parameters()).device`, `sum(p.numel() for p in self.parameters())`",
        verdict="same",
        module=step(_on_the_device),
    ),
    Habit(
        written="a gradient penalty on the input (WGAN-GP): `x.requires_grad_()`",
        verdict="refused",
        note="train with `parallel=dp`; sparse layers have second derivatives",
        module=step(_gradient_penalty),
        message="the input of layers needs a gradient",
        early=False,
    ),
    Habit(
        written="`self.all_gather` in a step",
        verdict="refused",
        note="in a hook it is the same",
        module=step(lambda self, x, y: self.all_gather(_loss(self, x, y)).mean()),
        message="a step calls all_gather",
        early=False,
    ),
    Habit(
        written="`self.trainer.strategy.barrier()` in a step",
        verdict="refused",
        note="in a hook it is the same",
        module=step(lambda self, x, y: (self.trainer.strategy.barrier(), _loss(self, x, y))[1]),
        message="a step calls barrier",
        early=False,
    ),
    Habit(
        written="`if self.trainer.is_global_zero:` or `self.logger.experiment` after the layers",
        verdict="different",
        note="rank 0 does not come there: use `self.log`, or a hook",
        module=LoggingByHand,
        seen=lambda trainer, module: module.written,
        differs=lambda plain, ranks: (plain, *ranks) == (6, 0, 0),
        synchronous=False,
    ),
    Habit(
        written="a `validation_step` whose result `on_validation_batch_end` uses",
        verdict="different",
        note="`None` there: log it, or use a torchmetric",
        module=hook(
            "on_validation_batch_end",
            lambda self, outputs, *rest: setattr(self, "told", outputs),
            hook("validation_step", lambda self, batch, i: self.layers(batch[0]).sum()),
        ),
        seen=lambda trainer, module: module.told is None,
        differs=lambda plain, ranks: not plain and all(ranks),
        synchronous=False,
    ),
]
