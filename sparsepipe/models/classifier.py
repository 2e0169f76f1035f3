"""The classifier of shapes and images, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparsepipe import sparse
from sparsepipe.errors import ConfigError
from sparsepipe.models.cases import CaseScores, mean_dice
from sparsepipe.models.chain import check_input, input_kind
from sparsepipe.models.losses import lovasz_softmax, mean_loss, soft_dice
from sparsepipe.models.metrics import (
    COUNTED,
    Accuracy,
    ClassAccuracy,
    Confusion,
    MeanIoU,
    Predictions,
    ious_of,
    predictions_of,
)
from sparsepipe.models.windows import Windows
from sparsepipe.utils.arguments import checked
from sparsepipe.utils.extensions import build_trusted


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """Builds a ``torch`` learning-rate scheduler once the length of the training is known.

    Args:
        factory: builds the scheduler from the optimizer and, given ``horizon``, the length.
        interval: unit in which the schedule advances, ``step`` or ``epoch``; None: ``step``.
            ``ReduceLROnPlateau`` always advances once an epoch.
        monitor: the metric that ``ReduceLROnPlateau`` watches; None: ``val/loss`` where its mode is
            ``min``, else ``val/accuracy``.
        horizon: name of ``factory``'s argument for the length in units of ``interval``
            (``total_steps`` of OneCycleLR, ``T_max`` of CosineAnnealingLR); None: it has none.
    """

    factory: Callable[..., LRScheduler]
    interval: Literal["step", "epoch"] | None = None
    horizon: str | None = None
    monitor: str | None = None

    def build(
        self, optimizer: Optimizer, *, steps: float, epochs: int, validated_every: int = 1
    ) -> dict[str, Any]:
        """Returns Lightning's configuration of the scheduler for a training of the given length.

        Args:
            optimizer: the optimizer whose learning rate is scheduled.
            steps: optimizer steps of the training; infinite if unknown.
            epochs: epochs of the training; negative if unknown.
            validated_every: number of epochs from one validation to the next.
        """
        interval, arguments = self.interval or "step", {}
        if self.horizon is not None:
            length = steps if interval == "step" else epochs
            if math.isinf(length) or length < 0:
                raise ConfigError(
                    f"the learning-rate schedule needs the training's length in {interval}s, "
                    "which is unknown",
                    remedy="set trainer.max_epochs to a number, or choose optim.schedule=null",
                )
            arguments[self.horizon] = int(length)
        scheduler = self.factory(optimizer, **arguments)
        if not isinstance(scheduler, ReduceLROnPlateau):
            return {"scheduler": scheduler, "interval": interval}
        monitor = self.monitor or ("val/loss" if scheduler.mode == "min" else "val/accuracy")
        frequency = validated_every if monitor.startswith("val/") else 1
        found = {"scheduler": scheduler, "interval": "epoch", "monitor": monitor}
        return {**found, "frequency": frequency}


class Optimised(pl.LightningModule):
    """LightningModule with an optimizer and a schedule of its learning rate.

    Either argument may also be a mapping with ``_target_`` that describes it.

    Args:
        optimizer: callable that returns an optimizer for the parameters that it gets.
        schedule: an :class:`LRSchedule`; or a callable (Hydra's ``_partial_: true``) that returns a
            scheduler for an optimizer, to advance once an epoch; None: a constant rate.
    """

    def __init__(
        self,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | Mapping[str, Any],
        schedule: LRSchedule | Callable[..., Any] | Mapping[str, Any] | None,
    ) -> None:
        super().__init__()
        self._optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = built(optimizer)
        schedule = built(schedule)
        if callable(schedule):
            schedule = LRSchedule(factory=schedule, interval="epoch")
        if not isinstance(schedule, LRSchedule | None):
            raise ConfigError(
                f"the learning-rate schedule is of the type {type(schedule).__name__}, which "
                "cannot build a scheduler",
                remedy="name a class of torch.optim.lr_scheduler with _partial_: true, or "
                "sparsepipe.models.LRSchedule",
            )
        self._schedule = schedule

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        try:
            return self._optimizer(parameters)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the optimizer refuses its settings: {error}",
                remedy="correct the keys of optim.optimizer",
            ) from error

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self._schedule is None:
            return optimizer
        entry = self._schedule.build(
            optimizer,
            steps=self.trainer.estimated_stepping_batches,
            epochs=self.trainer.max_epochs or 1,
            validated_every=self.trainer.check_val_every_n_epoch or 1,
        )
        return {"optimizer": optimizer, "lr_scheduler": entry}


class Classifier(Optimised):
    """Trains a network to classify shapes, or each voxel or point of a sample (segmentation).

    A batch is a mapping with ``input`` (a ``SparseTensor``, or a dense grid [B, C, X, Y, Z], as
    ``layers`` requires), ``label`` (int64 [B], or [B, X, Y, Z] of voxels, where -100 is ignored; or
    a ``SparseTensor`` on the sites of the input, whose features [N, K] count the points of each
    class in each voxel) and ``index`` (int64 [B], the sample's number in its split). Signals and
    images are dense grids of one and two spatial dimensions. The input is cast to the dtype of the
    parameters, since Lightning's precision casts plain tensors only.

    Logged: ``train/loss_step`` and ``train/accuracy_step`` per step; per epoch ``train/loss``,
    ``train/accuracy_epoch``, ``val/loss``, ``val/accuracy``, ``test/loss``, ``test/accuracy`` and
    ``test/class_accuracy``, the mean accuracy of the classes. Losses are plain cross-entropies in
    nats; ``train/objective`` is the minimised loss where smoothing, weights or further terms make
    it differ. Accuracies are top-1 shares in [0, 1]. With labels of voxels or points, all these
    count voxels or points, and ``val/class_accuracy``, ``val/mean_iou``, ``test/mean_iou`` and
    ``test/iou/<class>`` are added, each over the whole split. With ``test_cases``, so are
    ``test/dice/<class>``, the mean Dice coefficient over the cases, and ``test/mean_dice``, the
    mean over the cases of that over all classes but the first.

    A run's checkpoints contain the arguments as hyperparameters, so that ``load_from_checkpoint``
    can rebuild the network, from classes and functions of SparsePipe and PyTorch only (see
    :func:`sparsepipe.utils.extensions.is_trusted`).

    Args:
        layers: the network, which maps the input to logits [B, K], [B, K, X, Y, Z] of each voxel,
            or a ``SparseTensor`` [N, K] on the sites of the input; or a mapping with ``_target_``
            that describes it. In training it may return a tuple of logits (deep supervision):
            metrics are those of the first, and the minimised loss is a weighted mean over all, each
            of which has half the weight of the one before.
        num_classes: number of classes, K.
        optimizer: see :class:`Optimised`, also for ``schedule``.
        label_smoothing: share of the target spread evenly over the classes in training.
        class_weights: K weights of the classes in the minimised cross-entropy; None: all 1.
        lovasz: factor of the Lovász-Softmax loss, which is added to the cross-entropy.
        dice: factor of :func:`sparsepipe.models.losses.soft_dice`, which is added to it too.
        window: sizes of the samples in training; in evaluation, dense samples of other sizes are
            computed by overlapping :class:`sparsepipe.models.windows.Windows`. None: as a whole.
        class_names: K names, for reports; None: the numbers from 0.

    Attributes:
        test_confusion: counts int64 [K, K] of the last test on all ranks, with a row for each true
            class, and a further column if logits were not finite; None before a test.
        counted: what the last test has counted: ``shapes`` (samples), ``voxels`` or ``points``.
        test_predictions: ``index``, ``label``, ``prediction`` and ``probability``, each [S], of the
            S samples of the last test on all ranks; None before, and for voxels and points.
        test_cases: ``index`` [S] and ``dice``, ``iou`` and ``surface_mm``, each [S, K], of the
            S samples of the last test on all ranks (:class:`sparsepipe.models.cases.CaseScores`),
            for batches with labels of voxels and their ``spacing`` [B, D] in mm; otherwise None.
    """

    def __init__(
        self,
        layers: nn.Sequential | Mapping[str, Any],
        *,
        num_classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | Mapping[str, Any],
        schedule: LRSchedule | Callable[..., Any] | Mapping[str, Any] | None = None,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        lovasz: float = 0.0,
        dice: float = 0.0,
        window: Sequence[int] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(optimizer, schedule)
        if num_classes < 2:
            raise ConfigError(
                f"num_classes={num_classes} leaves nothing to classify",
                remedy="use data with at least two classes",
            )
        self.layers: nn.Sequential = built(layers)
        self._taken = input_kind(self.layers)
        self.num_classes = num_classes
        self.class_names = tuple(class_names or map(str, range(num_classes)))
        self.label_smoothing, self.lovasz, self.dice = label_smoothing, lovasz, dice
        self.windows = None if window is None else Windows(tuple(window))
        weights_K = None if class_weights is None else torch.tensor(class_weights).double()
        if weights_K is not None and len(weights_K) != num_classes:
            raise ConfigError(
                f"{len(weights_K)} class weights are given, but there are {num_classes} classes",
                remedy="give loss.class_weights one number for each class, or balanced",
            )
        self.class_weights_K: Tensor | None
        self.register_buffer("class_weights_K", weights_K, persistent=False)
        self.train_accuracy = Accuracy()
        self.val_accuracy = Accuracy()
        self.val_iou = MeanIoU(num_classes)
        self.val_class_accuracy = ClassAccuracy(num_classes)
        self.confusion = Confusion(num_classes)
        self.predictions = Predictions()
        self.test_confusion: Tensor | None = None
        self.counted = COUNTED[0]
        self.test_predictions: dict[str, Tensor] | None = None
        self.cases = CaseScores()
        self.test_cases: dict[str, Tensor] | None = None

    def forward(self, x: Any) -> Any:
        """Returns what ``layers`` make of the ``input`` of a batch: logits."""
        if isinstance(x, Tensor | sparse.SparseTensor):
            given = f"dense {x.dim() - 2}D" if isinstance(x, Tensor) else "sparse"
            check_input(given, self._taken)
            dtype = next((p.dtype for p in self.layers.parameters()), x.dtype)
            x = x.to(dtype) if x.dtype.is_floating_point else x
            windows = None if self.training or not isinstance(x, Tensor) else self.windows
            if windows is not None and tuple(x.shape[2:]) != windows.size:
                return windows(self.layers, x)
        return self.layers(x)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> STEP_OUTPUT:
        logits_BK, label_B, *lower = self._logits_and_labels(batch)
        loss, total = mean_loss(logits_BK, label_B)
        objective, weight, size = loss, total, int(total)
        # Else pipelines find the weight of PyTorch's own loss themselves, unless no label counts.
        is_own = bool(self.lovasz or self.dice or lower) or self.class_weights_K is not None
        if is_own or self.label_smoothing:
            objective, weight = self._objective(logits_BK, label_B)
        if lower:
            for depth, each in enumerate(lower, 1):
                objective = objective + 0.5**depth * self._objective(each, label_B)[0]
            objective = objective / (2 - 0.5 ** len(lower))
        if objective is not loss:
            self._log_epoch("train/objective", objective.detach(), size, shown=False)
        self.train_accuracy(logits_BK, label_B)
        # A step's value is this rank's; an epoch's value is the mean over all ranks.
        self.log("train/loss_step", loss.detach(), prog_bar=True, on_step=True, on_epoch=False)
        self._log_epoch("train/loss", loss.detach(), size)
        self.log(
            "train/accuracy",
            self.train_accuracy,
            prog_bar=True,
            on_step=True,
            on_epoch=True,
            batch_size=size,
        )
        # By its weight, a microbatch has its part in the loss of a minibatch.
        is_own = is_own or label_B.dtype.is_floating_point or not size
        return {"loss": objective, "weight": weight} if is_own else objective

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits_BK, label_B, *_ = self._logits_and_labels(batch)
        loss, total = mean_loss(logits_BK, label_B)
        size = int(total)
        self.val_accuracy(logits_BK, label_B)
        self._log_epoch("val/loss", loss, size)
        self._log_epoch("val/accuracy", self.val_accuracy, size)
        if label_B.dim() > 1:
            self.val_iou.update(logits_BK, label_B)
            self._log_epoch("val/mean_iou", self.val_iou, size)
            self.val_class_accuracy.update(logits_BK, label_B)
            self._log_epoch("val/class_accuracy", self.val_class_accuracy, size)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits_BK, label_B, *_ = self._logits_and_labels(batch)
        loss, total = mean_loss(logits_BK, label_B)
        self._log_epoch("test/loss", loss, int(total))
        self.confusion.update(logits_BK, label_B)
        if label_B.dim() == 1 and "index" in batch:
            self.predictions.update(batch, logits_BK)
        elif "spacing" in batch and isinstance(batch["label"], Tensor):
            self.cases.update(batch, logits_BK)

    def predict_step(self, batch: dict[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        logits_BK = self(batch["input"])
        logits_BK = logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32))
        if isinstance(logits_BK, sparse.SparseTensor):  # of N voxels; coords: int32 [N, 4]
            known = {**batch, "label": batch["label"].feats}
            found = {"coords": logits_BK.coords, **predictions_of(known, logits_BK.feats)}
        else:
            found = predictions_of(batch, logits_BK)
        return {name: value.cpu() for name, value in found.items()}

    def on_test_epoch_start(self) -> None:
        self.confusion.reset()
        self.predictions.reset()
        self.cases.reset()

    def on_test_epoch_end(self) -> None:
        counts_KK = self.confusion.compute()
        self.test_confusion = counts_KK.cpu()
        self.counted = COUNTED[int(self.confusion.counted)]
        kept = self.predictions.update_called  # False where voxels have labels
        self.test_predictions = self.predictions.compute() if kept else None
        hits_K, shapes_K = counts_KK.diagonal(), counts_KK.sum(dim=1)
        present = shapes_K > 0
        class_accuracy_K = hits_K[present] / shapes_K[present]
        self.test_cases = self.cases.compute() if self.cases.update_called else None
        # All these already include all ranks, so no synchronisation is needed.
        self.log("test/accuracy", hits_K.sum() / shapes_K.sum(), prog_bar=True)
        self.log("test/class_accuracy", class_accuracy_K.mean())
        if self.counted != "shapes":
            iou_K = ious_of(counts_KK)
            self.log("test/mean_iou", iou_K.nanmean(), prog_bar=True)
            for name, iou in zip(self.class_names, iou_K, strict=True):
                if not iou.isnan():
                    self.log(f"test/iou/{name}", iou)
        if self.test_cases is not None:
            for name, dice in zip(
                self.class_names, self.test_cases["dice"].nanmean(0), strict=True
            ):
                if not dice.isnan():
                    self.log(f"test/dice/{name}", dice)
            self.log("test/mean_dice", mean_dice(self.test_cases["dice"]).nanmean(), prog_bar=True)

    def _objective(self, logits: Tensor, label: Tensor) -> tuple[Tensor, float]:
        """Returns the minimised loss of logits, and the weight of its cross-entropy."""
        smoothing, weights_K = self.label_smoothing, self.class_weights_K
        loss, weight = mean_loss(
            logits, label, class_weights_K=weights_K, label_smoothing=smoothing
        )
        if self.lovasz:
            loss = loss + self.lovasz * lovasz_softmax(logits, label)
        if self.dice:
            loss = loss + self.dice * soft_dice(logits, label)
        return loss, weight

    def _logits_and_labels(self, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        """Returns the logits of a batch, its labels, and logits of deep supervision, if any."""
        found, label = self(batch["input"]), batch["label"]
        found = found if isinstance(found, tuple) else (found,)
        logits, *lower = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in found)
        if isinstance(label, sparse.SparseTensor):
            is_alike = isinstance(logits, sparse.SparseTensor) and len(logits) == len(label)
            # A pipeline's last stage has no coordinates of labels that share those of the input.
            knows_sites = is_alike and not label.coords.is_meta
            if not is_alike or (knows_sites and not torch.equal(logits.coords, label.coords)):
                raise ConfigError(
                    f"the data have labels of points in {len(label)} voxels, but the network "
                    "gives no logits of these voxels",
                    remedy="choose a network for scenes, such as model=minkunet14, or one with "
                    "model.head=segmentation",
                )
            return logits.feats, label.feats.to(logits.dtype)
        logits = logits.feats if isinstance(logits, sparse.SparseTensor) else logits
        expected = [*logits.shape[:1], *logits.shape[2:]]
        if list(label.shape) != expected:
            kinds = ("each voxel", "segmentation"), ("each sample", "classification")
            wanted, head = kinds[label.dim() == 1]
            raise ConfigError(
                f"the data have labels {list(label.shape)} of {wanted}, but the network's logits "
                f"{list(logits.shape)} need labels {expected}",
                remedy=f"choose model.head={head}, another network whose logits fit the labels, or "
                "data with other labels (data.labels)",
            )
        return logits, label, *lower

    def _log_epoch(self, name: str, value: Any, size: int, *, shown: bool = True) -> None:
        self.log(
            name,
            value,
            prog_bar=shown,
            on_step=False,
            on_epoch=True,
            sync_dist=isinstance(value, Tensor),
            batch_size=size,
        )


def built(value: Any) -> Any:
    """Builds the object that a mapping with ``_target_`` describes; returns other values as is."""
    return build_trusted(value) if isinstance(value, Mapping) else value
