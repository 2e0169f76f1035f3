"""Refuses, before anything runs, what a pipeline would train wrongly or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytorch_lightning as pl
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
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from sparsepipe.errors import ConfigError
from sparsepipe.strategies import trainer_internals as internals

_AVERAGES = (
    "averages the whole network on each rank, but a rank has only its stage",
    "remove it, and average checkpoints after the training",
)
_CALLBACKS: Mapping[type[Callback], tuple[str, str]] = {
    GradientAccumulationScheduler: (
        "accumulates gradients over steps, but stages update after each minibatch",
        "remove it, and use a larger batch or more replicas of each stage",
    ),
    BaseFinetuning: (
        "changes what is trained during a run, but a stage trains the same parameters throughout",
        "train in two runs instead",
    ),
    ModelPruning: (
        "prunes the whole network on each rank, but a rank has only its stage",
        "remove it, and prune after the training",
    ),
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    OnExceptionCheckpoint: (
        "saves when a rank fails, but a checkpoint needs all ranks",
        "remove it; ModelCheckpoint(every_n_train_steps=...) limits what a failure costs",
    ),
}
_CLOCKS = "but the ranks' clocks would not agree on a step"


def check_trainer(trainer: pl.Trainer, *, synchronises_norm: bool) -> None:
    """Refuses settings and callbacks of the Trainer that do not suit a pipeline."""
    accumulates = trainer.accumulate_grad_batches
    for is_set, problem, remedy in (
        (
            accumulates != 1,
            f"accumulate_grad_batches={accumulates} cannot be combined with a pipeline, whose "
            "stages update after each minibatch",
            "set it to 1; use a larger batch (synchronous pipelines, such as parallel=gpipe, go "
            "through it in parts), or more replicas of each stage",
        ),
        (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision} scales the loss, and stages would have to agree on the "
            "factor at each step",
            "use precision='bf16-mixed', which needs no scaling",
        ),
        (
            internals.goes_by_clock(trainer),
            f"val_check_interval is a time, {_CLOCKS} at which to validate",
            "give a number of batches or a fraction of an epoch",
        ),
        (
            synchronises_norm,
            "sync_batchnorm=true cannot be combined with a pipeline",
            "leave it out: each replica normalises by its own batch",
        ),
    ):
        if is_set:
            raise ConfigError(problem, remedy=remedy)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
            raise ConfigError(
                f"{kind}(save_on_exception=True) saves when a rank fails, but a checkpoint needs "
                "all ranks",
                remedy="leave it out; every_n_train_steps limits what a failure costs",
            )
        if internals.goes_by_clock(callback):
            raise ConfigError(
                f"{kind}(train_time_interval=...) is a time, {_CLOCKS} at which to save",
                remedy="give every_n_train_steps, a number of batches",
            )
        for refused, (why, remedy) in _CALLBACKS.items():
            if isinstance(callback, refused):
                raise ConfigError(f"{kind} {why}", remedy=remedy)


def check_module(module: pl.LightningModule, *, fitting: bool) -> None:
    """Refuses manual optimization, a compiled module, a ``backward`` method, lazy parameters."""
    name = type(module).__name__
    if fitting and not module.automatic_optimization:
        raise ConfigError(
            f"{name} optimizes by hand, but each rank of a pipeline updates its own layers",
            remedy="set automatic_optimization=True and return the loss from training_step",
        )
    if internals.is_compiled(module):
        raise ConfigError(
            f"{name} is compiled as a whole, but its layers run on different ranks",
            remedy="compile entries of the Sequential instead",
        )
    if fitting and is_overridden("backward", module):
        raise ConfigError(
            f"{name} has a backward of its own, but every stage runs a part of the backward pass",
            remedy="remove it; on_before_backward is called with the loss",
        )
    for key, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"{key} has no shape yet: its layer is lazy",
                remedy="run the network once on a batch before it is given to the Trainer",
            )


def check_optimization(
    optimizers: list[Optimizer], schedulers: Iterable[LRSchedulerConfig]
) -> None:
    """Refuses all but one optimizer, and schedulers that would act differently on each rank."""
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        types = ", ".join(type(each).__name__ for each in optimizers)
        raise ConfigError(
            f"configure_optimizers returns {types or 'no optimizer'}, but a pipeline needs exactly "
            "one torch.optim.Optimizer",
            remedy="return one optimizer; its parameter groups may have their own options",
        )
    for config in schedulers:
        if config.reduce_on_plateau and config.interval == "step":
            raise ConfigError(
                f"{type(config.scheduler).__name__} checks a metric, {config.monitor!r}, after "
                "each step, but ranks learn its value at different steps",
                remedy="set its interval to 'epoch'",
            )
