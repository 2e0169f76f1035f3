"""Habits of the Trainer's options, of data, and of Lightning's callbacks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as lightning
from pytorch_lightning.tuner import Tuner
from pytorch_lightning.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.integration.habits.habit import Base, Habit, calling, loader, samples, trained


class Built(Base):
    """The network is made in ``setup``, or in ``configure_model``."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, made = where, self.layers
        self.made = [made]  # no child
        self.layers = None  # type: ignore[assignment]

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            self.layers = self.made[0]

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = self.made[0]


def _early_stopping() -> pl.Callback:
    return lightning.EarlyStopping("val_loss", patience=2, min_delta=0.05)


def _stopped_in(trainer: pl.Trainer, module: Any) -> int:
    """The epoch in which a training ended before its last one."""
    assert trainer.current_epoch < 9
    return trainer.current_epoch


class Loading(Base):
    """Loaders of its own, made anew for each epoch."""

    def train_dataloader(self) -> Any:
        return loader(seed=self.current_epoch)

    def val_dataloader(self) -> Any:
        return loader(seed=4)


class Combined(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x, y), (other, _) = batch["a"], batch["b"]
        return F.cross_entropy(self.layers(x + 0.1 * other), y)


class Several(Base):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))


class Validated(Base):
    """Keeps the steps before which it was validated, each of them once a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def on_validation_epoch_end(self) -> None:
        self.at.append(self.global_step)


class Transferred(Base):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 2, batch[1]


class Predicting(Base):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).argmax(1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))


class Lazy(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.LazyLinear(8).double()


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
        self.layers[3].weight = self.layers[0].weight


class Milestones(lightning.LearningRateFinder):
    """From the documentation of ``LearningRateFinder``: searches at the beginning of epochs."""

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        return

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


class Unfreezing(lightning.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


def _find(trainer: pl.Trainer, module: Any) -> None:
    found = Tuner(trainer).lr_find(module, loader(), loader(seed=4), num_training=12, min_lr=1e-4)
    assert found is not None
    module.found = found.results["loss"], found.results["lr"], found.suggestion(2, 1)
    trainer.fit(module, loader(), loader(seed=4))


def _callback_of(kind: type[Any]) -> Any:
    return lambda trainer: next(c for c in trainer.callbacks if isinstance(c, kind))


def _evaluated(trainer: pl.Trainer, module: Any) -> None:
    trainer.fit(module, loader(), loader(seed=4))
    module.tested = trainer.test(module, loader(seed=5), verbose=False)
    predictions = trainer.predict(module, loader(seed=5))
    # A rank that does not read has no answers.
    answered = [torch.cat(predictions) if trainer.global_rank == 0 else None]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(answered)
    [module.predicted] = answered


def _fits(**loaders: Any) -> Any:
    return lambda trainer, module: trainer.fit(module, **{k: v() for k, v in loaders.items()})


def _callback(make: Any) -> Any:
    return lambda: {"callbacks": [make()]}


class ClippedByStage(Base):
    """In one process what two stages do."""

    def configure_gradient_clipping(self, *_: Any, **options: Any) -> None:
        for stage in (self.layers[:2], self.layers[2:]):
            nn.utils.clip_grad_norm_(stage.parameters(), 0.05)


def _clipped_by_stage() -> Tensor:
    weights: dict[str, Tensor] = trained(
        Habit(written="", verdict="same", module=ClippedByStage), "plain"
    )["weights"]
    return weights["layers.0.weight"]


def _quiet_compile() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(Base())


TRAINERS = [
    Habit(
        written='`gradient_clip_algorithm="value"`',
        verdict="same",
        trainer=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    Habit(
        written="`gradient_clip_val` (by norm)",
        verdict="different",
        note="by the norm of each stage; synchronous pipelines by that of all, as one device",
        trainer=lambda: {"gradient_clip_val": 0.05},
        seen=lambda trainer, module: module.layers[0].weight.detach().clone(),
        differs=lambda plain, ranks: (
            not torch.equal(plain, ranks[0]) and torch.equal(_clipped_by_stage(), ranks[0])
        ),
    ),
    Habit(
        written="`accumulate_grad_batches=2`",
        verdict="refused",
        note="a larger batch",
        trainer=lambda: {"accumulate_grad_batches": 2},
        message="accumulate_grad_batches=2",
    ),
    Habit(
        written='`precision="bf16-mixed"`',
        verdict="same",
        trainer=lambda: {"precision": "bf16-mixed"},
        module=lambda: Base().float(),
        fit=lambda trainer, module: trainer.fit(module, *map(_single, (3, 4))),
        synchronous=False,  # but for more rounding
    ),
    Habit(
        written="`max_steps`, `limit_train_batches`",
        verdict="same",
        trainer=lambda: {"max_steps": 5, "limit_train_batches": 0.7, "max_epochs": -1},
    ),
    Habit(
        written="`overfit_batches`, with a loader that shuffles",
        verdict="same",
        trainer=lambda: {"overfit_batches": 2},
        fit=_fits(
            train_dataloaders=lambda: DataLoader(samples(), batch_size=4, shuffle=True),
            val_dataloaders=loader,
        ),
    ),
    Habit(
        written="`val_check_interval=0.5`",
        verdict="same",
        module=Validated,
        trainer=lambda: {"val_check_interval": 0.5},
        drained=False,  # after each step even so: epochs are of two
        fit=_fits(train_dataloaders=lambda: loader(size=8), val_dataloaders=loader),
        seen=lambda trainer, module: module.at,
    ),
    Habit(
        written='`val_check_interval="00:00:10:00"`',
        verdict="refused",
        note="batches, or a share of an epoch",
        trainer=lambda: {"val_check_interval": "00:00:10:00"},
        message="val_check_interval is a time",
    ),
    Habit(
        written="`sync_batchnorm=True`",
        verdict="refused",
        note="leave it out",
        trainer=lambda: {"sync_batchnorm": True},
        message="sync_batchnorm=true",
    ),
    Habit(
        written="`torch.compile(module)`",
        verdict="refused",
        note="compile entries of the `Sequential`",
        module=_quiet_compile,
        message="is compiled as a whole",
        slow=True,  # imports the compiler
    ),
    Habit(
        written="the network made in `configure_model`",
        verdict="same",
        module=lambda: Built("configure_model"),
    ),
    Habit(
        written="lazy layers",
        verdict="refused",
        note="run the network once before",
        module=Lazy,
        message="has no shape yet",
    ),
    Habit(
        written="weights tied between stages",
        verdict="refused",
        note="move the cut, or untie them",
        module=Tied,
        message="are one parameter",
    ),
    Habit(
        written="a loader of an `IterableDataset` without a length",
        verdict="refused",
        note="give it a length",
        fit=_fits(train_dataloaders=lambda: DataLoader(Stream(), batch_size=4)),
        message="number of batches",
    ),
    Habit(
        written="`train_dataloader` of the module, `reload_dataloaders_every_n_epochs=1`",
        verdict="same",
        module=Loading,
        trainer=lambda: {"reload_dataloaders_every_n_epochs": 1},
        fit=lambda trainer, module: trainer.fit(module),
    ),
    Habit(
        written="a dictionary of loaders, `CombinedLoader`",
        verdict="same",
        module=Combined,
        fit=_fits(
            train_dataloaders=lambda: CombinedLoader(
                {"a": loader(), "b": loader(seed=9, size=8)}, "max_size_cycle"
            ),
            val_dataloaders=loader,
        ),
    ),
    Habit(
        written="several loaders of validation (`dataloader_idx`)",
        verdict="same",
        module=Several,
        fit=_fits(
            train_dataloaders=loader,
            val_dataloaders=lambda: [loader(seed=4), loader(seed=5)],
        ),
    ),
    Habit(
        written="`on_after_batch_transfer` (augmentation on the device)",
        verdict="same",
        module=Transferred,
    ),
    Habit(
        written="`trainer.test`, `trainer.predict` after the fit",
        verdict="same",
        note="predictions are known where the batch was read",
        module=Predicting,
        fit=_evaluated,
        seen=lambda trainer, module: (module.tested, module.predicted),
    ),
]


def _single(seed: int) -> DataLoader[Any]:
    x, y = samples(seed=seed).tensors
    return DataLoader(torch.utils.data.TensorDataset(x.float(), y), batch_size=4)


CALLBACKS = [
    Habit(
        written="`Tuner(trainer).lr_find`",
        verdict="same",
        fit=_find,
        seen=lambda trainer, module: module.found,
    ),
    Habit(
        written="the documentation's `FineTuneLearningRateFinder`, at epochs of one's choice",
        verdict="same",
        trainer=_callback(lambda: Milestones(num_training_steps=14, min_lr=1e-4)),
        seen=lambda trainer, module: module.lr,
    ),
    Habit(
        written="`EarlyStopping` on `val_loss`",
        verdict="same",
        trainer=lambda: {"max_epochs": 9, "callbacks": [_early_stopping()]},
        seen=_stopped_in,
    ),
    Habit(
        written="`LearningRateMonitor`",
        verdict="same",
        trainer=lambda: {
            "callbacks": [lightning.LearningRateMonitor("step")],
            "logger": pl.loggers.logger.DummyLogger(),
        },
        seen=lambda trainer, module: _callback_of(lightning.LearningRateMonitor)(trainer).lrs,
    ),
    Habit(
        written="`StochasticWeightAveraging`",
        verdict="refused",
        note="average checkpoints",
        trainer=_callback(lambda: lightning.StochasticWeightAveraging(0.1)),
        message="StochasticWeightAveraging averages the whole network",
    ),
    *(
        Habit(
            written=f"`{kind.__name__}`",
            verdict="refused",
            note="the same",
            trainer=_callback(kind),
            message=f"{kind.__name__} averages the whole network",
        )
        for kind in (lightning.WeightAveraging, lightning.EMAWeightAveraging)
    ),
    Habit(
        written="`GradientAccumulationScheduler`",
        verdict="refused",
        note="a larger batch",
        trainer=_callback(lambda: lightning.GradientAccumulationScheduler({1: 2})),
        message="accumulates gradients over steps",
    ),
    Habit(
        written="`BackboneFinetuning` and other `BaseFinetuning`",
        verdict="refused",
        note="two runs",
        trainer=_callback(Unfreezing),
        message="changes during training what is trained",
    ),
    Habit(
        written="`ModelPruning`",
        verdict="refused",
        note="prune after the training",
        trainer=_callback(lambda: lightning.ModelPruning("l1_unstructured")),
        message="changes parameters that are on other ranks",
    ),
    *(
        Habit(
            written=f"`{written}`",
            verdict="refused",
            note="`every_n_train_steps`",
            trainer=partial(
                lambda make: {"callbacks": [make()], "enable_checkpointing": True}, make
            ),
            message=message,
        )
        for written, make, message in (
            (
                "ModelCheckpoint(save_on_exception=True)",
                lambda: lightning.ModelCheckpoint(save_on_exception=True),
                "save_on_exception=True",
            ),
            (
                "OnExceptionCheckpoint",
                lambda: lightning.OnExceptionCheckpoint(tempfile.gettempdir()),
                "OnExceptionCheckpoint saves when a rank fails",
            ),
        )
    ),
    Habit(
        written="a copy of the module made in `on_fit_start` (`copy.deepcopy(pl_module)`)",
        verdict="different",
        note="of each rank's own stage, which rank 0 warns of",
        trainer=lambda: {
            "callbacks": [
                calling(
                    "on_fit_start",
                    lambda trainer, module: setattr(trainer, "copied", copy.deepcopy(module)),
                )
            ]
        },
        seen=lambda trainer, module: len(list(trainer.copied.parameters())),
        differs=lambda plain, ranks: (plain, *ranks) == (6, 2, 4),
        warns="goes through the parameters of",
        synchronous=False,
    ),
]
