"""Every private name of Lightning that SparsePipe relies on, behind public functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin


def replace_signal_broadcast(trainer: pl.Trainer, instead: Any) -> None:
    """Lightning tells all ranks of signals by a broadcast at each step: others' do it better.

    Args:
        trainer: its training loop changes.
        instead: is called before each step.
    """
    # Private, hence guarded.
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = instead  # type: ignore[method-assign]


@contextmanager
def device_told(module: pl.LightningModule) -> Iterator[torch.device]:
    """Within, ``module.device`` is where the parameters are.

    Lightning says in advance where they will be, for hooks that make tensors there. Batches
    that are to run before the move must not follow.
    """
    first = next(module.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    said = [(m, m._device) for m in module.modules() if isinstance(m, _DeviceDtypeModuleMixin)]
    for child, _ in said:
        child._device = device
    try:
        yield device
    finally:
        for child, before in said:
            child._device = before
