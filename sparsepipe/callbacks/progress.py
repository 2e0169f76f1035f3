"""Shows training progress: samples per second, a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from torch import Tensor
from typing_extensions import override

from sparsepipe.callbacks.metrics import epoch_metrics
from sparsepipe.runtime.collectives import process_group
from sparsepipe.sparse import SparseTensor
from sparsepipe.utils.progress import SILENCE, Count, Silence

log = logging.getLogger(__name__)


class Throughput(pl.Callback):
    """Logs an epoch's seconds, ``time/epoch_s``, and all ranks' samples/s, ``train/shapes_per_s``.

    The time is that of the epoch's training steps on the slowest rank, before and after a stop;
    the validation and the checkpoint at its end do not count.

    Attributes:
        shapes_per_s: moving average of all ranks' samples per second, for the progress bar.
    """

    def __init__(self) -> None:
        self.shapes_per_s = self._started_s = self._last_s = 0.0
        self._shapes, self._before = 0, (0.0, 0)

    @override
    def state_dict(self) -> dict[str, Any]:
        epoch_s, shapes = self._of_epoch()
        return {"epoch_s": epoch_s, "shapes": shapes}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = (state_dict["epoch_s"], state_dict["shapes"])

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning does not announce again an epoch that an earlier process began.
        self._started_s = self._last_s = time.perf_counter()
        self._shapes = 0

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_start(trainer, pl_module)
        self._before = (0.0, 0)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now_s = time.perf_counter()
        shapes = batch_size_of(batch)
        readers = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        rate = readers * shapes / max(now_s - self._last_s, 1e-9)
        self.shapes_per_s = rate if not self._shapes else 0.9 * self.shapes_per_s + 0.1 * rate
        self._shapes += shapes
        self._last_s = now_s

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch_s, shapes = self._of_epoch()
        pl_module.log("time/epoch_s", epoch_s)
        pl_module.log("train/shapes_per_s", shapes / max(epoch_s, 1e-9))

    def _of_epoch(self) -> tuple[float, int]:
        """Returns the epoch's seconds and number of samples so far, over all ranks; collective."""
        # Until the end of the last batch: a validation may have followed it.
        parts = process_group.gather_objects((self._last_s - self._started_s, self._shapes))
        before_s, shapes_before = self._before
        longest_s = max(seconds_s for seconds_s, _ in parts)
        read = sum(shapes for _, shapes in parts) // process_group.ranks_per_sample
        return before_s + longest_s, shapes_before + read


def batch_size_of(batch: Any) -> int:
    """Returns a batch's number of labels, over all domains, or else its first tensor's length."""
    if isinstance(batch, Tensor):
        return len(batch)
    if isinstance(batch, Mapping):
        if "label" in batch:
            label = batch["label"]
            return label.batch_size if isinstance(label, SparseTensor) else len(label)
        if batch and all(isinstance(each, Mapping) for each in batch.values()):
            return sum(map(batch_size_of, batch.values()))
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((size for item in batch if (size := batch_size_of(item))), 0)
    return 0


class ShapesProgressBar(RichProgressBar):
    """Lightning's Rich progress bar, with samples per second besides the logged metrics."""

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
    """Logs one line at each epoch's end, for output that is not a terminal.

    During long epochs, further lines say how many batches are done.

    Args:
        silence: decides when such a further line is due.
    """

    def __init__(self, *, silence: Silence = SILENCE) -> None:
        self._silence, self._epoch = silence, ""  # such as 1/10
        self._count: Count | None = None  # of the epoch's batches

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._count is None:
            total = trainer.num_training_batches
            batches = int(total) if math.isfinite(total) else None
            last = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else "?"
            self._epoch = f"{trainer.current_epoch + 1}/{last}"
            self._count = Count(f"epoch {self._epoch}, batches", batches)
        self._count.reached(batch_idx + 1)
        if trainer.is_global_zero:
            self._silence.break_if_due(lambda: f"{self._count}")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._count, values = None, epoch_metrics(trainer)
        if trainer.is_global_zero:
            shown = " ".join(f"{name}={value:.4g}" for name, value in sorted(values.items()))
            log.info("epoch %s %s", self._epoch, shown)
