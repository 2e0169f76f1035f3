"""Sparse layers by Triton's kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from sparsepipe.errors import BackendError
from sparsepipe.sparse.backends.native import NativeBackend, at_level
from sparsepipe.sparse.backends.triton.configurations import INTERPRETED
from sparsepipe.sparse.backends.triton.convolution import Convolution
from sparsepipe.sparse.backends.triton.levels import kernel_map
from sparsepipe.sparse.backends.triton.pooling import AveragePool, GlobalPool, MaxPool
from sparsepipe.sparse.backends.triton.tiles import input_rows
from sparsepipe.sparse.kernel_map import READERS, CoordinateCache, KernelMap
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor

log = logging.getLogger(__name__)

_MOST_OFFSETS = 32


@dataclass(frozen=True)
class TritonBackend(NativeBackend):
    """Convolves and pools with a few kernels a layer, on GPUs from sm 8.0 on.

    Computes in float16, bfloat16, and float32 with TF32. Results repeat bit for bit, and are those
    of the native backend but for rounding. The native backend computes float64, float32 where
    ``torch.set_float32_matmul_precision`` is "highest", windows of more than 32 offsets, and second
    derivatives; what goes to it is logged once.
    """

    name: ClassVar[str] = "triton"

    def _kernel_map(
        self, cache: CoordinateCache, spec: KernelSpec, *, is_turned: bool = False
    ) -> KernelMap:
        check_device(cache.coords_N4.device)
        if spec.volume > _MOST_OFFSETS:
            return super()._kernel_map(cache, spec, is_turned=is_turned)
        found = kernel_map(cache, spec)
        if is_turned:
            found.derived(READERS, lambda own: input_rows(own).sources_KM)
        return found

    def _convolve(
        self, feats: Tensor, kernel: Tensor, bias: Tensor | None, kernel_map: KernelMap
    ) -> Tensor:
        has_rows = kernel_map.num_inputs and kernel_map.num_outputs
        if not has_rows or not _suits(feats.dtype, kernel_map.spec):
            return super()._convolve(feats, kernel, bias, kernel_map)
        return self._multiply(feats, kernel, bias, kernel_map)

    def _multiply(
        self, feats: Tensor, kernel: Tensor, bias: Tensor | None, kernel_map: KernelMap
    ) -> Tensor:
        out: Tensor = Convolution.apply(feats, kernel, bias, kernel_map)  # type: ignore[no-untyped-call]
        return out

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """As :class:`.Backend` says."""
        check_device(x.device)
        if not _suits(x.dtype, spec) or not len(x):
            return super().max_pool3d(x, spec)
        found = kernel_map(x.cache, spec)
        out = MaxPool.apply(x.feats, found)  # type: ignore[no-untyped-call]
        return at_level(x, out, found.output, spec)

    def avg_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """As of :class:`.NativeBackend`."""
        check_device(x.device)
        if not _suits(x.dtype, spec) or not len(x):
            return super().avg_pool3d(x, spec)
        found = kernel_map(x.cache, spec)
        out = AveragePool.apply(x.feats, found)  # type: ignore[no-untyped-call]
        return at_level(x, out, found.output, spec)

    def global_max_pool(self, x: SparseTensor) -> Tensor:
        """As of :class:`.NativeBackend`."""
        out: Tensor | None = _global_pool(x, takes_largest=True)
        return super().global_max_pool(x) if out is None else out

    def global_avg_pool(self, x: SparseTensor) -> Tensor:
        """As of :class:`.NativeBackend`."""
        out: Tensor | None = _global_pool(x, takes_largest=False)
        return super().global_avg_pool(x) if out is None else out


def check_device(device: torch.device) -> None:
    """Raises a BackendError if Triton's kernels cannot run on a device."""
    is_cuda = device.type == "cuda"
    if not INTERPRETED and not (is_cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise BackendError(
            f"the kernels of the triton backend do not run on {device}",
            remedy="use a GPU from compute capability 8.0 on (of Ampere or later), or backend=auto,"
            " which computes natively elsewhere",
        )


def _suits(dtype: torch.dtype, spec: KernelSpec) -> bool:
    wide = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if spec.volume > _MOST_OFFSETS:
        _tell(f"windows of {spec.volume} offsets (at most {_MOST_OFFSETS})")
        return False
    if dtype == torch.float64 or (wide and not INTERPRETED):
        _tell("float64" if dtype == torch.float64 else "float32 of the highest precision")
        return False
    return True


@cache
def _tell(what: str) -> None:
    log.info("the native backend computes sparse layers with %s", what)


def _global_pool(x: SparseTensor, *, takes_largest: bool) -> Tensor | None:
    level = x.cache.on_device
    if level is None or not level.in_order or x.dtype == torch.float64 or not len(x):
        return None
    out: Tensor = GlobalPool.apply(  # type: ignore[no-untyped-call]
        x.feats, x.coords, x.batch_size, takes_largest
    )
    return out
