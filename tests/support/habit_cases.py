"""Modules with habits of people who write them, and those that reach across stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, INPUTS, CLASSES = 12, 4, 6, 4


def loader(
    *, seed: int = 3, dtype: torch.dtype = torch.float64, shuffle: bool = False
) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, INPUTS, generator=draw, dtype=torch.float64).to(dtype)
    y = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=shuffle)


class Base(pl.LightningModule):
    """A classifier as the first page of Lightning's documentation has one; cut at layer 2."""

    def __init__(self) -> None:
        super().__init__()
        entries = nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        self.layers = nn.Sequential(*entries).double()
        self.prepare()

    def prepare(self) -> None:
        """What a habit adds to ``__init__``."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(*batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def hooked(**methods: Callable[..., Any]) -> type[Base]:
    """A module with some methods of its own."""
    return type("Hooked", (Base,), methods)


def step(function: Callable[[Any, Tensor, Tensor], Any]) -> type[Base]:
    """A module whose training step returns ``function(self, x, y)``."""
    return hooked(training_step=lambda self, batch, batch_idx: function(self, *batch))


def options(**given: Any) -> Callable[[], dict[str, Any]]:
    return lambda: dict(given)


def calling(name: str, function: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
    """Options of a Trainer with a callback of one hook, called with trainer and module."""
    kind = type("Callback", (pl.Callback,), {name: lambda _, *args: function(*args[:2])})
    return lambda: {"callbacks": [kind()]}


@dataclass(frozen=True, kw_only=True)
class Habit:
    """One row of the table.

    Attributes:
        module: makes the module.
        trainer: options of the Trainer, made anew for each run.
        strategy: options of the pipeline.
        message: of a refusal; a habit without one is the same in a pipeline, or differs.
        early: whether it is refused on all ranks before any step.
        drained: whether each step is validated.
        fit: what a script does in place of ``trainer.fit(module, loader, validation)``.
        seen: what is compared beside weights and logged values, or judged by ``differs``.
        differs: whether what a plain Trainer and the two ranks have seen differs as documented.
        warns: what rank 0 warns of, once.
        synchronous: whether a synchronous pipeline does as one device, or refuses it, too.
    """

    module: Callable[[], Any] = Base
    trainer: Callable[[], dict[str, Any]] = dict
    strategy: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    early: bool = True
    drained: bool = True
    fit: Callable[[pl.Trainer, Any], Any] | None = None
    seen: Callable[[pl.Trainer, Any], Any] = lambda trainer, module: 0
    differs: Callable[[Any, list[Any]], bool] | None = None
    warns: str = ""
    synchronous: bool = True


def _keep(self: Base) -> None:
    self.kept = list(self.layers.parameters())


def _squares(parameters: Any) -> Tensor:
    return 0.01 * torch.stack([p.square().sum() for p in parameters]).sum()


def _scale_first(self: Base) -> Any:
    optimizer = Base.configure_optimizers(self)

    def scale(*_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = None if p.grad is None else p.grad * 0.5

    optimizer.register_step_pre_hook(scale)
    return optimizer


class Scaling(torch.optim.SGD):
    """Scales gradients by the norm of all of them."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        every = [p for group in self.param_groups for p in group["params"]]
        total = sum(float(p.grad.norm()) ** 2 for p in every) ** 0.5
        for parameter in every:
            parameter.grad.div_(1 + total)
        super().step()
        return loss


def _replace(self: Base) -> None:
    if self.current_epoch == 1:
        self.trainer.strategy.setup_optimizers(self.trainer)


def _of_classes(self: Base, x: Tensor, y: Tensor) -> Tensor:
    """Weighted and ignored labels of two voxels a sample, of two classes."""
    labels = torch.stack([y % 2, (y // 2).masked_fill(y == 1, -100)], dim=1)
    weight = torch.tensor([1.0, 7.0]).double()
    loss = F.cross_entropy(self.layers(x).unflatten(1, (2, 2)), labels, weight=weight)
    self.log("loss", loss, on_step=False, on_epoch=True)
    return loss


def _masked(self: Base, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    mask = y.double() + 1
    loss = (F.cross_entropy(self.layers(x), y, reduction="none") * mask).sum() / mask.sum()
    return {"loss": loss, "weight": mask.sum()}


def _backward_by_hand(self: Base, x: Tensor, y: Tensor) -> Tensor:
    """In one process Lightning drops these gradients before it computes the loss's."""
    logits = self.layers(x)
    logits.square().mean().backward(retain_graph=True)
    self.zero_grad()
    return F.cross_entropy(logits, y)


def _wrap(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    optimizer.step(closure=lambda: (optimizer_closure(), None)[0])


ACROSS_STAGES = {
    "`optimizer_step` with a closure that calls `optimizer_closure`, and changes gradients": Habit(
        module=hooked(optimizer_step=_wrap),
        message="optimizer_step calls optimizer_closure in a function of its own",
        early=False,
    ),
    "a penalty over parameters that the module keeps in a list or a closure": Habit(
        module=hooked(
            prepare=_keep, loss=lambda self, x, y: Base.loss(self, x, y) + _squares(self.kept)
        ),
        message="uses layers.0.weight, which is on another rank",
        early=False,
    ),
    "a penalty over the parameters in `optimizer.param_groups`": Habit(
        module=step(
            lambda self, x, y: (
                self.loss(x, y) + _squares(self.trainer.optimizers[0].param_groups[0]["params"])
            )
        ),
        message="uses layers.0.weight, which is on another rank",
        early=False,
    ),
    "a penalty over kept parameters of the last stage": Habit(
        module=hooked(
            prepare=_keep, loss=lambda self, x, y: Base.loss(self, x, y) + _squares(self.kept[2:])
        ),
        message="changes the gradient of layers.2.weight itself",
        early=False,
        drained=False,  # a synchronous one has the same
    ),
    "`.backward()` by hand in `on_before_backward`": Habit(
        module=hooked(
            on_before_backward=lambda self, loss: _squares(self.layers[4].parameters()).backward()
        ),
        message="changes the gradient of layers.4.weight itself",
        early=False,
    ),
    "`.backward()` by hand in a step": Habit(
        module=step(_backward_by_hand),
        message="training_step calls backward",
        early=False,
    ),
    "a buffer of another stage (`dict(self.named_buffers())[...]`)": Habit(
        module=hooked(
            prepare=lambda self: self.layers[1].register_buffer("m", torch.ones(3)),
            loss=lambda self, x, y: (
                Base.loss(self, x, y) * dict(self.named_buffers())["layers.1.m"].sum()
            ),
        ),
        message="uses layers.1.m, which is on another rank",
        early=False,
    ),
    "`cross_entropy` with weights of classes, ignored labels, or of voxels": Habit(
        module=step(_of_classes)
    ),
    'a masked mean (`return {"loss": loss, "weight": mask.sum()}`)': Habit(module=step(_masked)),
    "gradients changed in a hook before the step (`register_step_pre_hook`)": Habit(
        module=hooked(configure_optimizers=_scale_first)
    ),
    "`clip_grad_norm_` in a hook, or skipping an update by the norm of all gradients": Habit(
        module=hooked(
            on_before_optimizer_step=lambda self, _: nn.utils.clip_grad_norm_(
                self.parameters(), 0.05
            )
        ),
        message="from the gradients or weights of several layers",
        early=False,
    ),
    "an optimizer that uses the norm over all its parameters": Habit(
        module=hooked(configure_optimizers=lambda self: Scaling(self.parameters(), lr=0.1)),
        message="from the gradients or weights of several layers",
        early=False,
    ),
    "one that a hook replaces, or sets up again": Habit(
        module=hooked(on_train_epoch_start=_replace),
        message="the optimizer, or the parameters in its groups, changed",
        early=False,
    ),
}
