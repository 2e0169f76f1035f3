"""The default backend: for each tensor, the fastest that suits its device, dtype and window."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from sparsepipe.sparse.backends.native import NativeBackend
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoBackend(NativeBackend):
    """Computes with Triton's kernels on GPUs of compute capability 8.0 or higher where Triton is
    installed, natively elsewhere.

    Different devices of one run can use different backends. On a GPU, the Triton backend leaves to
    the native one what its kernels do not suit: float64, float32 of the highest precision, windows
    of many offsets.
    """

    name: ClassVar[str] = "auto"

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """See :class:`.Backend`."""
        return chosen(x.device).conv3d(x, kernel, bias, spec)

    def conv_transpose3d(
        self,
        x: SparseTensor,
        kernel: Tensor,
        bias: Tensor | None,
        spec: KernelSpec,
        *,
        like: SparseTensor | None = None,
    ) -> SparseTensor:
        """See :class:`.NativeBackend`."""
        return chosen(x.device).conv_transpose3d(x, kernel, bias, spec, like=like)

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """See :class:`.Backend`."""
        return chosen(x.device).max_pool3d(x, spec)

    def avg_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """See :class:`.NativeBackend`."""
        return chosen(x.device).avg_pool3d(x, spec)

    def global_max_pool(self, x: SparseTensor) -> Tensor:
        """See :class:`.NativeBackend`."""
        return chosen(x.device).global_max_pool(x)

    def global_avg_pool(self, x: SparseTensor) -> Tensor:
        """See :class:`.NativeBackend`."""
        return chosen(x.device).global_avg_pool(x)


@cache
def chosen(device: torch.device) -> NativeBackend:
    """Returns the fastest backend for a device; on a GPU the choice is logged."""
    if device.type != "cuda":
        return NativeBackend()
    found = NativeBackend()
    has_triton = importlib.util.find_spec("triton") is not None
    if has_triton and torch.cuda.get_device_capability(device) >= (8, 0):
        from sparsepipe.sparse.backends.triton.backend import TritonBackend, compiles

        found = TritonBackend() if compiles(device) else found
    log.info("sparse layers on %s: backend=%s", device, found.name)
    return found
