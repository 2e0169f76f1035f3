"""The default backend: for each tensor, the fastest that suits its device, dtype and window."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from sparsepipe.sparse.backends.native import NativeBackend
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor


@dataclass(frozen=True)
class AutoBackend(NativeBackend):
    """Computes with Triton's kernels on GPUs from sm 8.0 on where these are installed, natively
    elsewhere.

    Unlike devices choose for themselves. On a GPU, the Triton backend leaves to the native one what
    its kernels do not suit: float64, float32 of the highest precision, windows of many offsets.
    """

    name: ClassVar[str] = "auto"

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """As :class:`.Backend` says."""
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
        """As of :class:`.NativeBackend`."""
        return chosen(x.device).conv_transpose3d(x, kernel, bias, spec, like=like)

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """As :class:`.Backend` says."""
        return chosen(x.device).max_pool3d(x, spec)

    def avg_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """As of :class:`.NativeBackend`."""
        return chosen(x.device).avg_pool3d(x, spec)

    def global_max_pool(self, x: SparseTensor) -> Tensor:
        """As of :class:`.NativeBackend`."""
        return chosen(x.device).global_max_pool(x)

    def global_avg_pool(self, x: SparseTensor) -> Tensor:
        """As of :class:`.NativeBackend`."""
        return chosen(x.device).global_avg_pool(x)


@cache
def chosen(device: torch.device) -> NativeBackend:
    """Returns the fastest backend for a device."""
    has_triton = importlib.util.find_spec("triton") is not None
    if device.type == "cuda" and has_triton and torch.cuda.get_device_capability(device) >= (8, 0):
        from sparsepipe.sparse.backends.triton.backend import TritonBackend

        return TritonBackend()
    return NativeBackend()
