"""Work that keeps a device busy while its host goes on."""

from __future__ import annotations

import torch
from torch import Tensor


def late_zero(device: torch.device, *, size: int = 2000, products: int = 8) -> Tensor:
    """A zero that is there only when some slow kernels have run."""
    busy = torch.randn(size, size, device=device)
    for _ in range(products):
        product = busy @ busy
        busy = product / product.norm()
    return 0 * busy[0, 0]
