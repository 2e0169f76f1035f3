"""What a person sees of a training: a bar on a terminal, a line an epoch elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from typing_extensions import override

from sparsepipe.callbacks.metrics_csv import epoch_metrics
from sparsepipe.callbacks.throughput import Throughput

log = logging.getLogger(__name__)


class ShapesProgressBar(RichProgressBar):
    """Lightning's Rich bar with loss, accuracy and shapes per second.

    Args:
        throughput: knows the rate.
    """

    def __init__(self, throughput: Throughput) -> None:
        super().__init__()
        self._throughput = throughput

    @override
    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        items = {
            name.removeprefix("train/").removesuffix("_step"): value
            for name, value in super().get_metrics(trainer, pl_module).items()
            if name != "v_num" and not name.endswith("_epoch")
        }
        if trainer.training and self._throughput.shapes_per_s:
            items["shapes/s"] = f"{self._throughput.shapes_per_s:.0f}"
        return items


class EpochLines(pl.Callback):
    """Logs one line at each epoch's end, for output that is no terminal."""

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        values = epoch_metrics(trainer)
        if trainer.is_global_zero:
            last = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else "?"
            shown = " ".join(f"{name}={_short(value)}" for name, value in sorted(values.items()))
            log.info("epoch %d/%s %s", trainer.current_epoch + 1, last, shown)


def _short(value: Any) -> str:
    return f"{value:.4g}"
