"""The default backend: for each tensor, the fastest that suits its device, dtype and window."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from sparsepipe.sparse.backends.native import NativeBackend
from sparsepipe.sparse.tensor import SparseTensor

log = logging.getLogger(__name__)


def _by_device(method: str) -> Any:
    """Returns a method that calls the same one of the backend that suits its tensor's device."""

    def call(own: AutoBackend, x: SparseTensor, *args: Any, **options: Any) -> Any:
        return getattr(chosen(x.device), method)(x, *args, **options)

    return call


@dataclass(frozen=True)
class AutoBackend(NativeBackend):
    """Computes with Triton's kernels on GPUs of compute capability 8.0 or higher where Triton is
    installed, natively elsewhere.

    Different devices of one run can use different backends. On a GPU, the Triton backend leaves to
    the native one what its kernels do not suit: float64, float32 of the highest precision, windows
    of many offsets.
    """

    name: ClassVar[str] = "auto"

    conv3d = _by_device("conv3d")
    conv_transpose3d = _by_device("conv_transpose3d")
    max_pool3d = _by_device("max_pool3d")
    avg_pool3d = _by_device("avg_pool3d")
    global_max_pool = _by_device("global_max_pool")
    global_avg_pool = _by_device("global_avg_pool")


@cache
def chosen(device: torch.device) -> NativeBackend:
    """Returns the fastest backend for a device; on a GPU the choice is logged."""
    found = NativeBackend()
    if device.type != "cuda":
        return found
    has_triton = importlib.util.find_spec("triton") is not None
    if has_triton and torch.cuda.get_device_capability(device) >= (8, 0):
        from sparsepipe.sparse.backends.triton.backend import TritonBackend, compiles

        found = TritonBackend() if compiles(device) else found
    log.info("sparse layers on %s: backend=%s", device, found.name)
    return found
