"""Sparse layers with Triton kernels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sparsepipe.errors import BackendError
from sparsepipe.sparse.backends.native import NativeBackend, at_level
from sparsepipe.sparse.backends.triton.configurations import INTERPRETED
from sparsepipe.sparse.backends.triton.convolution import Convolution
from sparsepipe.sparse.backends.triton.levels import kernel_map
from sparsepipe.sparse.backends.triton.pooling import AveragePool, GlobalPool, MaxPool
from sparsepipe.sparse.backends.triton.rows import known_rows
from sparsepipe.sparse.backends.triton.tiles import input_rows
from sparsepipe.sparse.kernel_map import READERS, CoordinateCache, KernelMap
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor

log = logging.getLogger(__name__)

_MOST_OFFSETS = 32


@dataclass(frozen=True)
class TritonBackend(NativeBackend):
    """Convolves and pools with a few kernels a layer, on GPUs of compute capability 8.0 or higher.

    Computes in float16, bfloat16, and float32 with TF32. Results repeat bit for bit, and equal the
    native backend's up to rounding. The native backend computes float64, float32 where
    ``torch.set_float32_matmul_precision`` is "highest", windows of more than 32 offsets, second
    derivatives, and everything on a CPU; what goes to it is logged once.
    """

    name: ClassVar[str] = "triton"

    def _kernel_map(
        self,
        feats: Tensor,
        cache: CoordinateCache,
        spec: KernelSpec,
        *,
        is_turned: bool = False,
    ) -> KernelMap:
        if not _suits(feats.device, feats.dtype, spec):
            return super()._kernel_map(feats, cache, spec)
        with _at(feats):
            found = kernel_map(cache, spec)
            if is_turned:
                found.derived(READERS, lambda own: input_rows(own).sources_KM)
        return found

    def _convolve(
        self, feats: Tensor, kernel: Tensor, bias: Tensor | None, kernel_map: KernelMap
    ) -> Tensor:
        has_rows = kernel_map.num_inputs and kernel_map.num_outputs
        if not has_rows or not _suits(feats.device, feats.dtype, kernel_map.spec):
            return super()._convolve(feats, kernel, bias, kernel_map)
        fused = bias if bias is not None and bias.dtype == feats.dtype else None
        with _at(feats):
            out = self._multiply(feats, kernel, fused, kernel_map)
        return out if bias is None or fused is not None else out + bias

    def _multiply(
        self, feats: Tensor, kernel: Tensor, bias: Tensor | None, kernel_map: KernelMap
    ) -> Tensor:
        out: Tensor = Convolution.apply(feats, kernel, bias, kernel_map)  # type: ignore[no-untyped-call]
        return out

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """See :class:`.Backend`."""
        pooled = _pool(MaxPool, x, spec)
        return super().max_pool3d(x, spec) if pooled is None else pooled

    def avg_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """See :class:`.NativeBackend`."""
        pooled = _pool(AveragePool, x, spec)
        return super().avg_pool3d(x, spec) if pooled is None else pooled

    def global_max_pool(self, x: SparseTensor) -> Tensor:
        """See :class:`.NativeBackend`."""
        out = _global_pool(x, takes_largest=True)
        return super().global_max_pool(x) if out is None else out

    def global_avg_pool(self, x: SparseTensor) -> Tensor:
        """See :class:`.NativeBackend`."""
        out = _global_pool(x, takes_largest=False)
        return super().global_avg_pool(x) if out is None else out


def compiles(device: torch.device) -> bool:
    """Returns whether Triton can compile for a device, as it cannot without a C compiler."""
    try:
        with torch.cuda.device(device):
            known_rows(torch.zeros(1, 1, dtype=torch.int32, device=device), KernelSpec.of(1))
    except Exception as error:  # of Triton's own types, and of the programs that it calls
        log.warning(
            "Triton cannot compile for %s, so that the native backend runs: %s", device, error
        )
        return False
    return True


def _suits(device: torch.device, dtype: torch.dtype, spec: KernelSpec) -> bool:
    """Returns whether the kernels suit a layer; raises a BackendError on older GPUs."""
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.get_device_capability(device) < (8, 0):
        raise BackendError(
            f"the kernels of the triton backend do not run on {device}",
            remedy="use a GPU of compute capability 8.0 or higher (Ampere or later), or"
            " backend=auto, which computes natively elsewhere",
        )
    wide = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    unsuited = {
        f"windows of {spec.volume} offsets (at most {_MOST_OFFSETS})": spec.volume > _MOST_OFFSETS,
        "float64": dtype == torch.float64,
        "float32 of the highest precision": wide and not INTERPRETED,
        "features on a CPU": not (is_cuda or INTERPRETED),
    }
    for what, is_so in unsuited.items():
        if is_so:
            _tell(what)
    # A dispatch mode, such as a counter of operations, sees those of torch only.
    return not any(unsuited.values()) and _get_current_dispatch_mode() is None


@cache
def _tell(what: str) -> None:
    log.info("the native backend computes sparse layers with %s", what)


def _at(tensor: Tensor) -> Any:
    """Context for Triton, which launches on the current device, and not on that of tensors."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def _pool(by: Any, x: SparseTensor, spec: KernelSpec) -> SparseTensor | None:
    if not _suits(x.device, x.dtype, spec) or not len(x):
        return None
    with _at(x.feats):
        found = kernel_map(x.cache, spec)
        out = by.apply(x.feats, found)
    return at_level(x, out, found.output, spec)


def _global_pool(x: SparseTensor, *, takes_largest: bool) -> Tensor | None:
    level = x.cache.on_device
    if level is None or not level.in_order or x.dtype == torch.float64 or not len(x):
        return None
    with _at(x.feats):
        out: Tensor = GlobalPool.apply(  # type: ignore[no-untyped-call]
            x.feats, x.coords, x.batch_size, takes_largest
        )
    return out
