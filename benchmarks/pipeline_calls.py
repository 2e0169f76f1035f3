"""How long the calls of a rank of a pipeline take, each by itself: measured while it trains.

A training tells by itself how long its ranks wait (``bubble_share``), but not for what they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import pytorch_lightning as pl
from typing_extensions import override

from sparsepipe.runtime.stage import Flight, StageLayers
from sparsepipe.runtime.weights.modes import Memory
from sparsepipe.strategies.pipeline.pipeline import Pipeline

CALLS: Mapping[str, tuple[type, str]] = {
    "forward": (StageLayers, "forward"),
    "backward": (Flight, "backward"),
    "copy": (Memory, "move"),
    "update": (Pipeline, "update"),
}
"""What is timed, and the worker's call that does it. The last stage's forward includes the loss."""


class CallTimes(pl.Callback):
    """Puts a clock around calls, for as long as the process lives.

    Attributes:
        epochs: of each epoch so far, seconds a minibatch of each of :data:`CALLS`.
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self._seconds: dict[str, float] = {}
        self._steps = 0
        for kind, (owner, name) in CALLS.items():
            setattr(owner, name, self._timed(kind, getattr(owner, name)))

    def _timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - start_s
                self._seconds[kind] = self._seconds.get(kind, 0.0) + took_s

        return timed

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds, self._steps = {}, 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._steps += 1

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append({kind: self._seconds.get(kind, 0.0) / self._steps for kind in CALLS})
