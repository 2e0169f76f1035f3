"""The default backend: plain PyTorch, wherever PyTorch runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsepipe.errors import BackendError
from sparsepipe.sparse.backends.convolution import convolve
from sparsepipe.sparse.backends.pooling import max_pool
from sparsepipe.sparse.kernel_map import CoordinateCache
from sparsepipe.sparse.kernel_spec import KernelSpec
from sparsepipe.sparse.tensor import SparseTensor


@dataclass(frozen=True)
class NativeBackend:
    """Sparse convolution as gather, matrix products and sums over bags of rows.

    Computes in float32, float64, bfloat16 and float16; under autocast in the autocast
    dtype. Two runs give the same bits, on a CPU and on CUDA: nothing adds atomically.
    """

    name: ClassVar[str] = "native"

    def conv3d(
        self, x: SparseTensor, kernel: Tensor, bias: Tensor | None, spec: KernelSpec
    ) -> SparseTensor:
        """See :class:`~sparsepipe.sparse.backends.protocol.Backend`.

        Raises:
            BackendError: kernel, features and window do not fit each other.
            CoordinateError: the coordinates are not valid.
        """
        feats, kernel, bias = _under_autocast(x.feats, kernel, bias)
        _check_operands(feats, kernel, spec)
        if spec.is_pointwise:
            out = feats @ kernel[0]
            output = x.cache
        else:
            kernel_map = x.cache.kernel_map(spec)
            out = convolve(feats, kernel, kernel_map)
            output = kernel_map.output or x.cache
        if bias is not None:
            out = out + bias
        return _at_level(x, out, output, spec)

    def max_pool3d(self, x: SparseTensor, spec: KernelSpec) -> SparseTensor:
        """See :class:`~sparsepipe.sparse.backends.protocol.Backend`.

        Where several inputs are largest the gradient goes to the first in (x, y, z)
        order, as in a dense max-pool.

        Raises:
            CoordinateError: the coordinates are not valid.
        """
        kernel_map = x.cache.kernel_map(spec)
        return _at_level(x, max_pool(x.feats, kernel_map), kernel_map.output or x.cache, spec)


def _at_level(
    x: SparseTensor, feats: Tensor, level: CoordinateCache, spec: KernelSpec
) -> SparseTensor:
    if level is x.cache:
        return x.replace_feats(feats)
    sx, sy, sz = (a * b for a, b in zip(x.stride, spec.stride, strict=True))
    return SparseTensor(
        feats,
        level.coords_N4,
        stride=(sx, sy, sz),
        spatial_shape=level.spatial_shape,
        batch_size=x.batch_size,
        cache=level,
    )


def _under_autocast(
    feats: Tensor, kernel: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    device_type = feats.device.type
    if not torch.is_autocast_enabled(device_type) or feats.dtype == torch.float64:
        return feats, kernel, bias
    dtype = torch.get_autocast_dtype(device_type)
    return feats.to(dtype), kernel.to(dtype), None if bias is None else bias.to(dtype)


def _check_operands(feats: Tensor, kernel: Tensor, spec: KernelSpec) -> None:
    if kernel.dim() != 3 or kernel.shape[0] != spec.volume or kernel.shape[1] != feats.shape[1]:
        raise BackendError(
            f"a kernel of shape {tuple(kernel.shape)} for {feats.shape[1]} channels and a window"
            f" of {spec.size}",
            remedy=f"give a kernel of shape [{spec.volume}, {feats.shape[1]}, out_channels]",
        )
    if kernel.dtype != feats.dtype:
        raise BackendError(
            f"features are {feats.dtype}, the kernel is {kernel.dtype}",
            remedy="convert the tensor first, x.to(kernel.dtype), or run under torch.autocast",
        )
