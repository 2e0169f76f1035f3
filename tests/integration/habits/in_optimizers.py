"""Habits of optimizers, of their schedules, and of the hooks around their steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import lr_scheduler as schedulers

from tests.integration.habits.habit import Base, Habit, hook


def configured(function: Any) -> type[Base]:
    return hook("configure_optimizers", function)


def _sgd(self: Base) -> torch.optim.SGD:
    return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def _scheduled(make: Any, **config: Any) -> type[Base]:
    def configure(self: Base) -> Any:
        optimizer = _sgd(self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make(self, optimizer), **config},
        }

    return configured(configure)


def _groups(self: Base) -> Any:
    decayed = [p for n, p in self.named_parameters() if n.endswith("weight")]
    others = [p for n, p in self.named_parameters() if not n.endswith("weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.001}]
    return torch.optim.AdamW(groups, lr=0.01)


def _two(self: Base) -> Any:
    halves = self.layers[:2].parameters(), self.layers[2:].parameters()
    return [torch.optim.SGD(half, lr=0.1) for half in halves], []


class ByHand(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def _warm_up(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    """From the documentation of ``optimizer_step``."""
    optimizer.step(closure=optimizer_closure)
    if self.trainer.global_step < 5:
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, float(self.trainer.global_step + 1) / 5.0) * 0.1


def _skip(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    if batch_idx % 2 == 0:
        optimizer.step(closure=optimizer_closure)
    else:
        optimizer_closure()


def _twice(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    optimizer.step(closure=optimizer_closure)
    optimizer.step(closure=optimizer_closure)


def _timm(self: Any, scheduler: Any, metric: Any) -> None:
    scheduler.step(epoch=self.current_epoch)


def _own_clipping(
    self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


OPTIMIZERS = [
    Habit(
        written="one optimizer, parameter groups with options of their own",
        verdict="same",
        module=configured(_groups),
    ),
    Habit(
        written='`OneCycleLR` with `interval="step"`, `self.trainer.estimated_stepping_batches`',
        verdict="same",
        module=_scheduled(
            lambda self, optimizer: schedulers.OneCycleLR(
                optimizer, 0.5, total_steps=int(self.trainer.estimated_stepping_batches)
            ),
            interval="step",
        ),
    ),
    Habit(
        written="`ReduceLROnPlateau` on `val_loss`, each epoch",
        verdict="same",
        module=_scheduled(
            lambda self, optimizer: schedulers.ReduceLROnPlateau(
                optimizer, patience=0, threshold=0.9
            ),
            monitor="val_loss",
        ),
    ),
    Habit(
        written="the same after each step",
        verdict="refused",
        note='`interval: "epoch"`',
        module=_scheduled(
            lambda self, optimizer: schedulers.ReduceLROnPlateau(optimizer),
            monitor="val_loss",
            interval="step",
        ),
        message="ReduceLROnPlateau looks after each step at a metric",
    ),
    Habit(
        written="`lr_scheduler_step` of one's own (timm)",
        verdict="same",
        module=hook(
            "lr_scheduler_step",
            _timm,
            _scheduled(lambda self, o: schedulers.LambdaLR(o, lambda epoch: 0.5**epoch)),
        ),
    ),
    Habit(
        written="several optimizers (GANs)",
        verdict="refused",
        note="groups of one optimizer",
        module=configured(_two),
        message="multiple optimizers",
    ),
    Habit(
        written="`LBFGS`",
        verdict="refused",
        note="an optimizer that takes one gradient",
        module=configured(lambda self: torch.optim.LBFGS(self.parameters())),
        message="LBFGS evaluates the whole network",
    ),
    Habit(
        written="`automatic_optimization = False`, `self.manual_backward`",
        verdict="refused",
        note="return the loss",
        module=ByHand,
        message="optimizes by hand",
    ),
    Habit(
        written="`backward` overridden",
        verdict="refused",
        note="`on_before_backward`, `on_after_backward`",
        module=hook("backward", lambda self, loss: loss.backward()),
        message="has a backward of its own",
    ),
    Habit(
        written="`optimizer_step` with a warm-up of the rate",
        verdict="same",
        module=hook("optimizer_step", _warm_up),
    ),
    Habit(
        written="`optimizer_step` that skips updates (`else: optimizer_closure()`)",
        verdict="refused",
        note="at the first batch so skipped: a larger batch, or `optimizer.step` with each",
        module=hook("optimizer_step", _skip),
        message="optimizer_step calls optimizer_closure by itself",
        early=False,
    ),
    Habit(
        written="two updates of one batch",
        verdict="refused",
        note="one",
        module=hook("optimizer_step", _twice),
        message="makes two updates of one batch",
        early=False,
    ),
    Habit(
        written="`configure_gradient_clipping` with `self.clip_gradients`",
        verdict="same",
        module=hook("configure_gradient_clipping", _own_clipping),
    ),
]
