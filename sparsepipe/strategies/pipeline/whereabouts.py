"""Where a module is while it is set up: still on the host, whatever Lightning says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin


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
