"""A profile of four unlike layers, and pauses that are only noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies import Strategy

from sparsepipe.emulate.replay import ReplayPace
from sparsepipe.profiling import LayerProfile, Profile

_ROWS = (
    # forward_s, backward_s, activation_bytes, parameter_bytes
    (0.1, 0.3, 4000, 400),
    (0.2, 0.0, 4000, 0),
    (0.0, 0.5, 1002, 42),
    (0.05, 0.06, 0, 80),
)


UPDATES_S = (1.0, 0.0, 0.125, 0.25)
"""Of the layers, where they are told."""


def profile(*, updates: bool = False, **meta: object) -> Profile:
    layers = tuple(
        LayerProfile(
            index=index,
            name=str(index),
            kind="Linear" if parameter_bytes else "ReLU",
            forward_s=forward_s,
            backward_s=backward_s,
            activation_bytes=activation_bytes,
            parameter_bytes=parameter_bytes,
            update_s=UPDATES_S[index] if updates else None,
        )
        for index, (forward_s, backward_s, activation_bytes, parameter_bytes) in enumerate(_ROWS)
    )
    return Profile(layers=layers, meta={"model": "mlp", "batch_size": 8, **meta})


class Noted:
    """What a pace is asked for; the clock stands still but for that, and for work."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self._now_s = 0.0

    def pace(self) -> ReplayPace:
        return ReplayPace(clock=lambda: self._now_s, sleep=self._sleep)

    def work(self, seconds: float) -> None:
        """Something real takes time."""
        self._now_s += seconds

    def _sleep(self, seconds: float) -> None:
        self.taken.append(round(seconds, 9))
        self._now_s += seconds


def plain_trainer(
    directory: Path,
    *callbacks: pl.Callback,
    strategy: Strategy | str = "auto",
    max_epochs: int = 1,
    **more: Any,
) -> pl.Trainer:
    """One epoch on one CPU; without any strategy of ours, if none is given."""
    return pl.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        **more,
    )
