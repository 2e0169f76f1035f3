"""Checks that refuse, before anything runs, what a pipeline cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from pytorch_lightning.utilities.model_helpers import is_overridden
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import trainer_internals as internals

_CALLBACKS: Mapping[type[Callback], tuple[str, str]] = {
    GradientAccumulationScheduler: (
        "accumulates gradients over steps",
        "remove it: use a larger batch, or more replicas of each stage",
    ),
    BaseFinetuning: ("changes during training what is trained", "train in two runs instead"),
    ModelPruning: ("changes parameters that are on other ranks", "prune after the training"),
    StochasticWeightAveraging: (
        "averages the whole network on each rank",
        "remove it: average checkpoints after the training",
    ),
    WeightAveraging: (
        "averages the whole network on each rank",
        "remove it: average checkpoints after the training",
    ),
    OnExceptionCheckpoint: (
        "saves when a rank fails, and a checkpoint needs all of them",
        "remove it: ModelCheckpoint(every_n_train_steps=...) limits what a failure costs",
    ),
}

_CLOCKS = "and the ranks' clocks would disagree on the step"


def check_trainer(trainer: pl.Trainer, *, synchronises_norm: bool) -> None:
    """Refuse settings of the Trainer."""
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} does not go with a "
            "pipeline, whose stages update after each minibatch",
            remedy="set it to 1; use a larger batch (synchronous pipelines, such as "
            "parallel=gpipe, go through it in parts), or more replicas of each stage",
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigError(
            f"precision={trainer.precision} scales the loss, by a factor that stages would have "
            "to agree on at each step",
            remedy="use precision='bf16-mixed', which needs no scaling",
        )
    if internals.validates_by_time(trainer):
        raise ConfigError(
            f"val_check_interval is a time, {_CLOCKS}",
            remedy="give a number of batches or a fraction of an epoch",
        )
    if synchronises_norm:
        raise ConfigError(
            "sync_batchnorm=true does not go with a pipeline",
            remedy="leave it out: each replica normalises by its own batch",
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _check_callback(callback)


def _check_callback(callback: Callback) -> None:
    if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
        raise ConfigError(
            "ModelCheckpoint(save_on_exception=True): a checkpoint needs all ranks, and one of "
            "them has failed",
            remedy="leave it out; every_n_train_steps limits what a failure costs",
        )
    if internals.saves_by_time(callback):
        raise ConfigError(
            f"{type(callback).__name__}(train_time_interval=...) is a time, {_CLOCKS}",
            remedy="give every_n_train_steps, a number of batches",
        )
    for kind, (why, remedy) in _CALLBACKS.items():
        if isinstance(callback, kind):
            raise ConfigError(f"{type(callback).__name__} {why}", remedy=remedy)


def check_module(module: pl.LightningModule, *, fitting: bool) -> None:
    """Refuse what a LightningModule does."""
    name = type(module).__name__
    if fitting and not module.automatic_optimization:
        raise ConfigError(
            f"{name} optimizes by hand, and updates happen where the layers are",
            remedy="set automatic_optimization=True and return the loss from training_step",
        )
    if internals.is_compiled(module):
        raise ConfigError(
            f"{name} is compiled as a whole", remedy="compile entries of the Sequential instead"
        )
    if fitting and is_overridden("backward", module):
        raise ConfigError(
            f"{name} has a backward of its own, and every stage needs its part of it",
            remedy="remove it; on_before_backward is called with the loss",
        )
    for hook in ("training_step", "validation_step", "test_step", "predict_step"):
        step: Callable[..., Any] = getattr(module, hook)
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{name}.{hook} takes the loader itself", remedy="let it take a batch"
            )


class OneUpdate:
    """Holds a module's ``optimizer_step`` to one update of each batch, which the stages make."""

    def __init__(self) -> None:
        self._updating = False
        self._stepped = False

    def begin_batch(self) -> None:
        self._stepped = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Within, the optimizer steps, and calls its closure."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    def check_step(self, module: pl.LightningModule) -> None:
        """Refuse the step of a batch that ends in no update, or in a second one.

        Raises:
            ConfigError: the module calls the closure, and not the optimizer with it, or calls the
                optimizer twice.
        """
        name = f"{type(module).__name__}.optimizer_step"
        if not self._updating:
            raise ConfigError(
                f"{name} calls optimizer_closure by itself, to leave out an update or make it "
                "later, and in a pipeline each stage updates when the minibatch comes back to it",
                remedy="call optimizer.step(closure=optimizer_closure) with every batch; a larger "
                "batch takes the place of updates that are left out",
            )
        if self._stepped:
            raise ConfigError(
                f"{name} makes two updates of one batch",
                remedy="call optimizer.step(closure=optimizer_closure) once",
            )
        self._stepped = True


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Explains that a module may have one optimizer only."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ConfigError(
            "configure_optimizers gives several optimizers",
            remedy="give one; it may have groups of parameters with their own options",
        ) from error


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Refuse more than one optimizer."""
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ConfigError(
            f"configure_optimizers gives {len(optimizers)} optimizers of torch",
            remedy="give one; it may have groups of parameters with their own options",
        )


def check_schedulers(schedulers: Iterable[LRSchedulerConfig]) -> None:
    """Refuse schedulers that would do something else on each rank."""
    for config in schedulers:
        if config.reduce_on_plateau and config.interval == "step":
            raise ConfigError(
                f"{type(config.scheduler).__name__} looks after each step at a metric, "
                f"{config.monitor!r}, which ranks come to know at different steps",
                remedy="set its interval to 'epoch'",
            )


def check_output(output: Any) -> torch.Tensor:
    """The loss that a training step returned."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"training_step returned {type(output).__name__}",
            remedy="return the loss, or a dictionary with it as 'loss', from every step",
        )
    return loss
